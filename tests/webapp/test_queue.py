"""Runs that wait for their turn."""

import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import FIXTURE, Server, fixture_settings, make_run, read_events, started, wait_for, writing
from trainer_core.events import Finished, Phase
from trainer_core.run_dir import RunDir
from trainer_core.run_folders import RunFolders
from webapp import supervisor
from webapp.run_queue import RunQueue

LONG = {"epochs": 100_000}


def enqueue(server: Server, name: str, **changes: Any) -> str:
    """Add a run on the fixture to the queue; its id."""
    answer = server.http.post("/api/runs?queue=true", json=fixture_settings(name=name, **changes))
    assert answer.status_code == 201, answer.text
    run_id = answer.json()["id"]
    assert isinstance(run_id, str)
    return run_id


def names(server: Server) -> list[str]:
    """The queue, the next one first."""
    listed = server.http.get("/api/runs").json()
    by_id = {run["id"]: run for run in listed["runs"]}
    assert all(by_id[run_id]["status"] == "queued" for run_id in listed["queue"])
    return [by_id[run_id]["name"] for run_id in listed["queue"]]


def test_runs_wait_in_an_order_that_can_be_changed_and_can_be_taken_out(shared_server: Server) -> None:
    active = make_run(shared_server.home)
    with writing(active) as writer:
        writer.write(Phase(name="importing", message="m"))
        a, b, c = (enqueue(shared_server, name) for name in "abc")
        assert names(shared_server) == ["a", "b", "c"]
        assert shared_server.http.post(f"/api/runs/{c}/queue", json={"position": 1}).json() == {"queue": [c, a, b]}
        assert shared_server.http.post(f"/runs/{c}/queue", data={"position": "2"}).status_code == 303
        assert names(shared_server) == ["a", "c", "b"]
        assert shared_server.http.post(f"/api/runs/{a}/queue", json={"position": 10**30}).json() == {"queue": [c, b, a]}

        cancelled = shared_server.http.post(f"/api/runs/{b}/stop").json()
        assert (cancelled["status"], cancelled["message"]) == ("stopped", "Taken out of the queue before it began.")
        assert names(shared_server) == ["c", "a"]
        assert shared_server.http.post(f"/api/runs/{b}/queue", json={"position": 1}).status_code == 409
        assert shared_server.http.post(f"/runs/{a}/delete").status_code == 303
        assert names(shared_server) == ["c"]
        for position in (0, -1, "1", True, None, 1.5, 0.0):
            answer = shared_server.http.post(f"/api/runs/{c}/queue", json={"position": position})
            assert answer.status_code == 422, position
            assert "a whole number from 1" in answer.json()["error"]
        assert shared_server.http.post("/api/runs?queue=yes", json=fixture_settings()).status_code == 400
        assert shared_server.http.post("/api/runs", json=fixture_settings()).status_code == 409


def test_a_queue_that_can_not_be_written_keeps_no_run(shared_server: Server) -> None:
    (shared_server.home / "queue.json").unlink(missing_ok=True)
    (shared_server.home / "queue.json").mkdir()
    try:
        answer = shared_server.http.post("/api/runs?queue=true", json=fixture_settings())
        assert answer.status_code == 507
        assert list(shared_server.runs) == []
    finally:
        (shared_server.home / "queue.json").rmdir()


def test_a_form_in_the_queue_twice_is_one_run(shared_server: Server) -> None:
    active = make_run(shared_server.home)
    form = {"model.source": str(FIXTURE / "checkpoint"), "dataset.source": str(FIXTURE / "tensors"), "form_token": "x"}
    with writing(active) as writer:
        writer.write(Phase(name="importing", message="m"))
        first, again = (shared_server.http.post("/runs?queue=true", data=form) for _ in range(2))
        changed = shared_server.http.post("/runs?queue=true", data=form | {"name": "Another"})
        refused = shared_server.http.post("/runs", data=form | {"name": "A third"})
    assert first.headers["location"] == again.headers["location"] != changed.headers["location"]
    assert [first.status_code, again.status_code, changed.status_code, refused.status_code] == [303, 303, 303, 409]
    assert "or queue this run" in refused.text
    assert 'value="A third"' in refused.text


@pytest.mark.parametrize(
    ("asked", "taken", "status"),
    [("cpu", "cuda", 201), ("cuda", "cuda", 409), ("cpu", "auto", 409), ("auto", "cuda", 409), ("cpu", "cpu", 409)],
)
def test_one_run_a_device(asked: str, taken: str, status: int, server: Server) -> None:
    """`auto` may turn out to be any."""
    active = make_run(server.home, hardware={"device": taken})
    with writing(active) as writer:
        writer.write(started(device=f"{taken}:0" if taken == "cuda" else taken))  # as PyTorch calls it
        answer = server.http.post("/api/runs", json=fixture_settings(hardware={"device": asked}, training=LONG))
        assert answer.status_code == status, answer.text


def test_a_start_does_not_overtake_those_that_wait(tmp_path: Path) -> None:
    """In the moment between the end of one and the turn of the next."""
    runs, waiting = RunFolders(tmp_path), make_run(tmp_path, name="The next")
    RunQueue(runs).add(waiting)
    with pytest.raises(supervisor.RunActive, match="The next waits in the queue"):
        supervisor.start_in_background(runs, waiting.load_config())
    assert [run.id for run in runs] == [waiting.id]


def test_those_that_wait_do_not_overtake_each_other(tmp_path: Path) -> None:
    """The first may turn out to want what the second wants."""
    runs = RunFolders(tmp_path)
    active, first, second = (make_run(tmp_path, hardware={"device": device}) for device in ("cpu", "auto", "cuda"))
    with writing(active):
        for run in (first, second):
            RunQueue(runs).add(run)
        supervisor.start_queued(runs)
        assert [run.id for run in RunQueue(runs).waiting()] == [first.id, second.id]


@pytest.mark.parametrize("damage", [None, "[]", "[1, null, {}]", "{", "[" * 100_000])
def test_a_run_that_the_queue_has_lost_is_taken_up_again(damage: str | None, tmp_path: Path) -> None:
    queue = RunQueue(RunFolders(tmp_path))
    kept, lost = make_run(tmp_path), make_run(tmp_path)
    queue.add(kept)
    if damage is None:
        (tmp_path / "queue.json").unlink()
    else:
        (tmp_path / "queue.json").write_text(damage)
    assert queue.waiting() == []
    queue.take_up(before=0)
    assert queue.waiting() == []
    queue.take_up(before=time.time() + 1)
    assert [run.id for run in queue.waiting()] == [kept.id, lost.id]


def test_the_queue_survives_the_server_and_a_failed_run_does_not_hold_it_up(server: Server, tmp_path: Path) -> None:
    data = tmp_path / "data"
    shutil.copytree(FIXTURE / "tensors", data)
    active = make_run(server.home)
    with writing(active) as writer:
        writer.write(Phase(name="importing", message="m"))
        third = enqueue(server, "third", training=LONG)
        first = enqueue(server, "first", dataset={"source": str(data)})
        second = enqueue(server, "second")
        server.http.post(f"/api/runs/{third}/queue", json={"position": 3})
        shutil.rmtree(data)
        server.kill()
        server.start()
        assert names(server) == ["first", "second", "third"]
        writer.write(Finished(reason="completed", message="m", step=0, epoch=0))
    runs = [RunDir(server.home / "runs" / run_id) for run_id in (first, second, third)]
    wait_for(lambda: read_events(runs[2]), "the third run's turn", 90)
    assert [run.status() for run in runs] == ["failed", "completed", "starting"]
    assert "There is no folder" in read_events(runs[0])[-1]["message"]
    began = [read_events(run)[0]["time"] for run in runs]
    ended = [read_events(run)[-1]["time"] for run in runs[:2]]
    assert began[0] < ended[0] < began[1] < ended[1] < began[2]
    assert names(server) == []
