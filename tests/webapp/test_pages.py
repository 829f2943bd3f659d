"""Pages, forms and JSON of a real server over real HTTP."""

import json
import shutil
import zipfile
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FIXTURE, Server, fixture_settings, make_run, read_events, wait_for
from trainer_core.config import RunConfig, fields, flatten
from trainer_core.run_dir import RunDir
from webapp.forms import form_sections, from_form, to_values

LONG = {"epochs": 100_000}


def form(**changes: str) -> dict[str, str]:
    """What the browser posts for a quick run on the fixture model."""
    values = to_values({}) | {name: str(value) for name, value in flatten(fixture_settings()).items()}
    return values | {name.replace("__", "."): value for name, value in changes.items()}


def test_the_form_is_made_from_the_configs_fields() -> None:
    shown = [field for section in form_sections(to_values({})) for field in section.fields]
    assert [field.name for field in shown] == list(fields())
    assert from_form((field.name, field.value) for field in shown)["training"]["epochs"] == "40"
    assert {field.name: field.unit for field in shown}["training.warmup_steps"] == "steps"


def test_switches_lists_and_auto_come_back_from_the_form_as_they_were() -> None:
    given = {
        "adapter": {"type": "dora", "rank_stabilized": True, "targets": ["mlp", "layers.0.self_attn.q_proj"]},
        "training": {"gradient_checkpointing": 2, "condition_dropout": 0.5},
    }
    config = RunConfig.model_validate(given)
    values = to_values(config.model_dump())
    assert (values["adapter.rank_stabilized"], values["training.gradient_checkpointing"]) == ("on", "2")
    assert values["adapter.decompose_both"] == "off"
    assert values["adapter.targets"] == "mlp, layers.0.self_attn.q_proj"
    assert (values["training.condition_dropout"], to_values({})["training.condition_dropout"]) == ("0.5", "auto")
    assert RunConfig.model_validate(from_form(values.items())) == config


def test_names_that_are_no_fields_survive_the_form_to_be_refused() -> None:
    posted = [("training", "x"), ("training.epochs", "1"), ("a.b.c", "2"), ("", "3")]
    assert from_form(posted) == {"training": "x", "training.epochs": "1", "a": {"b.c": "2"}, "": "3"}


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("adapter.rank", "0", "0&#39; was given; this takes a whole number from 1 to 1,024."),
        ("training.learning_rate", "abc", "&#39;abc&#39; was given; this takes a number above 0, up to 1."),
        ("dataset.source", "/no/such/folder", "There is no folder /no/such/folder."),
        ("dataset.source", "{empty}", "is empty."),
        ("dataset.source", "{file}", "is a file."),
        ("dataset.source", "{no_tensors}", "holds no tensors"),
        ("model.source", "{no_config}", "has no config.json"),
        ("model.source", "{no_weights}", "no weights"),
        ("model.source", "{other_model}", "describes llama, not an ACE-Step 1.5 model"),
        ("name", "", "Nothing was given"),
        ("hardware.device", "toaster", "this takes one of auto, cuda"),
        ("no.such_field", "1", "There is no such field."),
        ("adapter.targets", "", "Nothing was given; this takes names, apart by commas."),
        ("adapter.decompose_factor", "0", "0 is no factor to split by"),
        ("adapter.rank_stabilized", "perhaps", "this takes one of off, on."),
        ("training.condition_dropout", "2", "&#39;2&#39; was given; this takes auto or a number from 0 to 1."),
        ("training.condition_dropout", "some", "this takes auto or a number from 0 to 1."),
        ("dataset.validation_fraction", "0.6", "this takes a number from 0 to 0.5."),
        ("resume_from", "/no/such/folder", "There is no folder /no/such/folder."),
    ],
)
def test_bad_input_stands_at_its_field_and_nothing_is_lost(
    field: str, value: str, message: str, shared_server: Server, tmp_path: Path
) -> None:
    """I3."""
    folders = {name: tmp_path / name for name in ("empty", "no_tensors", "no_config", "no_weights", "other_model")}
    for folder in folders.values():
        folder.mkdir()
    (tmp_path / "file").touch()
    (folders["no_tensors"] / "song.wav").touch()
    (folders["no_config"] / "model.safetensors").touch()
    shutil.copy(FIXTURE / "checkpoint" / "config.json", folders["no_weights"])
    (folders["other_model"] / "config.json").write_text('{"model_type": "llama"}')
    posted = form(name="Kept <b>name</b>") | {field: value.format(file=tmp_path / "file", **folders)}

    answer = shared_server.http.post("/runs", data=posted)

    assert answer.status_code == 422
    assert message in answer.text
    if field in fields():
        wrapper = answer.text.partition(f'data-field="{field}"')[2].partition('data-field="')[0]
        assert "data-error" in wrapper
    if field != "name":
        assert 'value="Kept &lt;b&gt;name&lt;/b&gt;"' in answer.text
    assert f'value="{posted["model.source"]}"' in answer.text
    assert list(shared_server.runs) == []


def test_the_api_reports_every_problem_with_its_field(shared_server: Server) -> None:
    wrong = fixture_settings(adapter={"rank": 0}, training={"learning_rate": "abc", "unknown": 1})
    answer = shared_server.http.post("/api/runs", json=wrong)
    assert answer.status_code == 422
    assert set(answer.json()) == {"error", "fields"}
    assert set(answer.json()["fields"]) == {"adapter.rank", "training.learning_rate", "training.unknown"}


@pytest.mark.parametrize(
    ("content", "status"), [(b"{", 400), (b"[]", 422), (b'"text"', 422), (b"\xff\xfe", 400), (b"", 400), (b"null", 422)]
)
def test_a_body_that_is_no_json_object_is_refused(content: bytes, status: int, shared_server: Server) -> None:
    answer = shared_server.http.post("/api/runs", content=content)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}


def test_a_run_goes_from_the_form_to_a_zip_and_can_be_started_again_with_its_settings(server: Server) -> None:
    answer = server.http.post("/runs", data=form(name="Étude №1", adapter__rank="2"))
    assert answer.status_code == 303
    page = answer.headers["location"]
    (run,) = server.runs
    assert page == f"/runs/{run.id}"
    assert server.http.get(page).status_code == 200
    wait_for(lambda: run.status() == "completed", "the run", 90)

    listed = server.http.get("/api/runs").json()["runs"]
    shown = server.http.get(f"/api/runs/{run.id}").json()
    assert listed == [shown]
    assert (shown["name"], shown["step"], shown["total_steps"]) == ("Étude №1", 6, 6)
    assert shown["loss"] == read_events(run, "step")[-1]["loss"]
    (saved,) = shown["checkpoints"]

    download = server.http.get(f"{page}/checkpoints/{saved['name']}/download?format=peft&precision=fp32")
    assert download.status_code == 200
    assert int(download.headers["content-length"]) == len(download.content)
    assert 'filename="etude-no1-step-000006-peft-fp32.zip"' in download.headers["content-disposition"]
    with zipfile.ZipFile(BytesIO(download.content)) as archive:
        assert archive.testzip() is None
        assert [name.rpartition("/") for name in archive.namelist()] == [
            ("etude-no1-step-000006-peft-fp32", "/", name)
            for name in ("HOW-TO-LOAD.txt", "adapter_config.json", "adapter_model.safetensors")
        ]
        assert abs(archive.getinfo(archive.namelist()[2]).file_size - saved["bytes"]) < 16  # of padding

    again = server.http.get(f"/runs/new?from={run.id}").text
    assert 'value="Étude №1"' in again
    assert 'name="adapter.rank" type="text" value="2"' in again

    events = server.http.get(f"/api/runs/{run.id}/events?after=3").text.splitlines()
    assert events == run.events.read_text().splitlines()[3:]
    assert server.http.post(f"{page}/delete").status_code == 303
    assert not run.path.exists()
    assert server.http.get(page).status_code == 404


def test_one_run_at_a_time_and_the_refusal_names_it(server: Server) -> None:
    """G5: ten starts at once give one run and nine refusals."""

    def start(number: int) -> Any:
        return server.http.post("/api/runs", json=fixture_settings(training=LONG))

    with ThreadPoolExecutor(10) as pool:
        answers = list(pool.map(start, range(10)))
    (started,) = [answer for answer in answers if answer.status_code == 201]
    refused = [answer for answer in answers if answer.status_code == 409]
    assert len(refused) == 9
    assert {answer.json()["active"] for answer in refused} == {started.json()["id"]}
    assert all("is being trained" in answer.json()["error"] for answer in refused)
    (run,) = server.runs
    wait_for(lambda: read_events(run, "step"), "a step", 60)

    answer = server.http.post("/runs", data=form(name="A second one"))
    assert answer.status_code == 409
    assert "fixture is being trained" in answer.text
    assert f'href="/runs/{run.id}"' in answer.text
    assert 'value="A second one"' in answer.text
    assert server.http.post(f"/runs/{run.id}/delete").status_code == 409

    assert server.http.post(f"/runs/{run.id}/stop").status_code == 303
    assert server.http.post(f"/api/runs/{run.id}/stop").json()["status"] in ("stopping", "stopped")
    wait_for(lambda: run.status() == "stopped", "the stop", 20)
    assert run.list_checkpoints()
    assert server.http.post(f"/api/runs/{run.id}/stop").json()["status"] == "stopped"


PATHS = [
    "..",
    "%2e%2e",
    "..%2f..%2foutside",
    "%2fetc%2fpasswd",
    "..%5coutside",
    "C:%5cWindows",
    "a%00b",
    "outside-link",
]


@pytest.mark.parametrize("name", [*PATHS, "no-such-run"])
@pytest.mark.parametrize("address", ["/runs/{}", "/api/runs/{}", "/api/runs/{}/events", "/runs/new?from={}"])
def test_no_address_leads_out_of_the_home(name: str, address: str, shared_server: Server) -> None:
    """H2."""
    outside = shared_server.home.parent / "outside"
    outside.mkdir(exist_ok=True)
    (outside / "config.json").write_text('{"name": "secret"}')
    link = shared_server.home / "runs" / "outside-link"
    link.symlink_to(outside)
    try:
        answer = shared_server.http.get(address.format(name))
    finally:
        link.unlink()
    assert "secret" not in answer.text
    if name == ".." and "?" not in address:  # the client resolves it away: another page, if any
        assert answer.status_code in (200, 404)
    else:
        assert answer.status_code == 404


@pytest.mark.parametrize("name", [*PATHS, "..%2fruns_evil", "runs_evil"])
@pytest.mark.parametrize("action", ["/runs/{}/stop", "/runs/{}/delete", "/api/runs/{}/stop"])
def test_no_action_leads_out_of_the_home(name: str, action: str, shared_server: Server) -> None:
    """H2."""
    evil = shared_server.home / "runs_evil"
    evil.mkdir(exist_ok=True)
    (evil / "config.json").write_text("{}")
    answer = shared_server.http.post(action.format(name))
    assert answer.status_code in (404, 405)
    assert [path.name for path in evil.iterdir()] == ["config.json"]


@pytest.mark.parametrize("name", ["..%2f..", "%2e%2e", "step-000001%2f..", "..%5c..", "%00", "step-1", "adapter"])
def test_no_checkpoint_address_leads_out_of_its_run(name: str, shared_server: Server, tmp_path: Path) -> None:
    """H2."""
    run = make_run(shared_server.home)
    answer = shared_server.http.get(f"/runs/{run.id}/checkpoints/{name}/download")
    assert answer.status_code == 404


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/nothing", "text/html"), ("/api/nothing", "application/json"), ("/api/runs/x", "application/json")],
)
def test_an_unknown_address_answers_in_kind(path: str, kind: str, shared_server: Server) -> None:
    answer = shared_server.http.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"].startswith(kind)


def test_a_damaged_run_folder_breaks_no_page(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    run.config.write_text("{broken")
    run.events.write_bytes(
        b"\0" * 100
        + b'\n{}\n[]\nnot json\n{"type":[]}\n{"type":{}}\n{"type":"step","loss":NaN}\n{"type":"finished"}\n'
        + b'{"type": "started", "total_steps": 3}\n'
    )
    (run.checkpoints / "step-000001").mkdir(parents=True)
    for name in ("adapter_config.json", "adapter_model.safetensors", "state.json"):
        (run.checkpoints / "step-000001" / name).touch()
    for address in ("/", f"/runs/{run.id}", "/api/runs", f"/runs/new?from={run.id}"):
        assert shared_server.http.get(address).status_code == 200


def test_a_run_folder_that_can_not_be_written_loses_nothing(shared_server: Server) -> None:
    runs = shared_server.home / "runs"
    runs.rename(runs.with_name("moved"))
    runs.touch()
    try:
        answer = shared_server.http.post("/runs", data=form(name="Kept"))
        assert answer.status_code == 507
        assert "The run can&#39;t be started" in answer.text
        assert 'value="Kept"' in answer.text
    finally:
        runs.unlink()
        runs.with_name("moved").rename(runs)


def test_a_queued_folder_made_by_hand_is_shown(shared_server: Server) -> None:
    run: RunDir = make_run(shared_server.home)
    assert "queued" in shared_server.http.get(f"/runs/{run.id}").text


@pytest.mark.parametrize("name", ["Take 2.0", "1.0", "  spaces  inside ", "-"])
def test_settings_come_back_as_they_were_given(name: str, shared_server: Server) -> None:
    run = make_run(shared_server.home)
    settings = run.settings() | {"name": name, "model": {"source": "/models/acestep-1.0"}}
    run.config.write_text(json.dumps(settings))
    again = shared_server.http.get(f"/runs/new?from={run.id}").text
    assert f'value="{name}"' in again
    assert 'value="/models/acestep-1.0"' in again
    assert 'name="training.max_grad_norm" type="text" value="1"' in again


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"model": {"source": "~nobody-by-this-name/x"}}, "model.source"),
        ({"dataset": {"source": "~nobody-by-this-name/x"}}, "dataset.source"),
    ],
)
def test_a_home_of_nobody_is_an_error_at_its_field(settings: dict[str, Any], field: str, shared_server: Server) -> None:
    answer = shared_server.http.post("/api/runs", json=settings)
    assert answer.status_code == 422
    assert set(answer.json()["fields"]) == {field}


@pytest.mark.parametrize("kind", ["application/json", "text/plain", ""])
def test_what_is_no_form_starts_no_demo(kind: str, shared_server: Server) -> None:
    answer = shared_server.http.post("/runs", content='{"name": "mine"}', headers={"Content-Type": kind})
    assert answer.status_code == 415
    assert list(shared_server.runs) == []


def test_half_a_character_is_refused(shared_server: Server) -> None:
    for body in (b'{"name": "\\ud800"}', b'{"\\ud800": 1}', b'{"model": {"source": "\\udfff"}}'):
        answer = shared_server.http.post("/api/runs", content=body)
        assert answer.status_code == 422
        assert "half a character" in answer.json()["fields"]["config"]


def test_deeply_nested_json_is_refused(shared_server: Server, tmp_path: Path) -> None:
    nested = "[" * 100_000
    assert shared_server.http.post("/api/runs", content=nested).status_code == 400
    (tmp_path / "config.json").write_text(nested)
    answer = shared_server.http.post("/api/runs", json={"model": {"source": str(tmp_path)}})
    assert "is not valid JSON" in answer.json()["fields"]["model.source"]
