"""A run that is continued over HTTP: a new run that names its parent, or the form with what stands in the way."""

import json
from pathlib import Path

import httpx
import pytest

from tests.conftest import FIXTURE, Server, fixture_settings, make_run, read_events, wait_for
from tests.trainer_core.training import run_training, stop_at
from trainer_core.run_dir import RunDir


@pytest.fixture
def stopped(shared_server: Server) -> RunDir:
    """A run of six steps that was stopped after the fourth."""
    return run_training(shared_server.home, stop_at(4))[0]


def continued(answer: httpx.Response, server: Server) -> RunDir:
    """The run that a resume led to, once it has ended."""
    assert answer.status_code == 303
    run = server.runs.find(answer.headers["location"].removeprefix("/runs/"))
    assert run
    wait_for(lambda: run.status() not in ("starting", "running"), "the resumed run", 60)
    return run


def test_a_resume_makes_a_run_of_its_own_that_names_its_parent(shared_server: Server, stopped: RunDir) -> None:
    http = shared_server.http
    before = {path: path.read_bytes() for path in stopped.path.rglob("*") if path.is_file()}
    run = continued(http.post(f"/runs/{stopped.id}/resume"), shared_server)
    assert run.id != stopped.id
    assert [event["step"] for event in read_events(run, "step")] == [5, 6]
    shown = http.get(f"/api/runs/{run.id}").json()
    parent = str(stopped.checkpoints / "step-000004")
    assert (shown["status"], shown["step"], shown["resume_from"]) == ("completed", 6, parent)
    assert http.get(f"/api/runs/{stopped.id}").json()["resume_from"] is None
    page = http.get(f"/runs/{run.id}").text
    assert f'Continues\n    <a href="/runs/{stopped.id}">fixture</a>, step-000004' in page
    assert {path: path.read_bytes() for path in before} == before

    again = http.get(f"/runs/new?resume={run.id}").text
    assert 'value="fixture (from step 6)"' in again
    assert "It completed 2 epochs; to train longer" in again

    # All epochs are done now: the form says so, filled in.
    answer = http.post(f"/runs/{run.id}/resume")
    assert answer.status_code == 422
    assert "Give more than 2 to train on." in answer.text
    assert f'value="{run.checkpoints / "step-000006"}"' in answer.text
    assert 'name="adapter.rank" type="text" value="4"' in answer.text
    # Other settings of the same parent: as a start from its weights, over the API.
    settings = fixture_settings(training={"learning_rate": 0.5}, resume_from=parent)
    refused = http.post("/api/runs", json=settings).json()
    assert refused["fields"].keys() == {"training.learning_rate"}


def test_the_form_to_continue_is_filled_in_with_the_chosen_checkpoint(shared_server: Server, stopped: RunDir) -> None:
    http = shared_server.http
    page = http.get(f"/runs/new?resume={stopped.id}&checkpoint=step-000004").text
    assert f'name="resume_from" type="text" value="{stopped.checkpoints / "step-000004"}"' in page
    assert f'Continues <a href="/runs/{stopped.id}">fixture</a> exactly from its checkpoint step-000004' in page
    assert 'name="name" type="text" value="fixture (from step 4)"' in page
    assert http.get(f"/runs/new?resume={stopped.id}&checkpoint=step-000003").status_code == 404
    assert http.get(f"/runs/new?resume={stopped.id}&checkpoint=../../x").status_code == 404
    assert http.get("/runs/new?resume=no-such-run").status_code == 404
    assert http.post("/runs/no-such-run/resume").status_code == 404


def test_settings_used_again_do_not_continue_the_run(shared_server: Server, stopped: RunDir) -> None:
    settings = stopped.settings() | {"resume_from": str(stopped.checkpoints / "step-000004")}
    stopped.config.write_text(json.dumps(settings))
    page = shared_server.http.get(f"/runs/new?from={stopped.id}").text
    assert 'name="resume_from" type="text" value=""' in page


def test_a_run_without_a_checkpoint_can_not_be_continued(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    answer = shared_server.http.post(f"/runs/{run.id}/resume")
    assert answer.status_code == 409
    assert "no checkpoint to continue from" in answer.text


def test_a_run_that_ended_before_its_own_checkpoint_takes_its_parents_up_again(
    shared_server: Server, stopped: RunDir
) -> None:
    parent = str(stopped.checkpoints / "step-000004")
    child = make_run(shared_server.home, resume_from=parent)
    child.record_exit(-9, None)
    page = shared_server.http.get(f"/runs/new?resume={child.id}").text
    assert f'name="resume_from" type="text" value="{parent}"' in page
    stopped.delete()
    answer = shared_server.http.post(f"/runs/{child.id}/resume")
    assert answer.status_code == 422
    assert f"There is no folder {parent}." in answer.text


def test_an_adapter_from_elsewhere_is_named_by_its_folder(shared_server: Server) -> None:
    start = str(FIXTURE / "adapter")
    run = make_run(shared_server.home, start_from=start)
    page = shared_server.http.get(f"/runs/{run.id}").text
    assert f"Started from the weights of\n    {start}" in page
    assert shared_server.http.get(f"/api/runs/{run.id}").json()["start_from"] == start


@pytest.mark.parametrize("source", ["/no/such/folder", "relative/folder", "\0", "~nobody-here/x"])
@pytest.mark.parametrize("field", ["resume_from", "start_from"])
def test_a_folder_that_is_none_is_refused_at_its_field(field: str, source: str, shared_server: Server) -> None:
    answer = shared_server.http.post("/api/runs", json=fixture_settings(**{field: source}))
    assert answer.status_code == 422
    assert answer.json()["fields"].keys() == {field}
    assert list(shared_server.runs) == []


def test_the_best_checkpoint_by_validation_is_marked(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    for step, loss in ((1, float("nan")), (2, 0.25), (3, None), (4, "x"), (10, 0.25)):
        folder = Path(run.checkpoints / f"step-{step:06d}")
        folder.mkdir(parents=True)
        (folder / "state.json").write_text(json.dumps({"step": step, "epoch": 1, "validation_loss": loss}))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            (folder / name).touch()
    found = shared_server.http.get(f"/api/runs/{run.id}").json()["checkpoints"]
    assert [(saved["step"], saved["best"]) for saved in found] == [
        (1, False),
        (2, True),
        (3, False),
        (4, False),
        (10, False),
    ]
    assert not any(saved["resumable"] for saved in found)
