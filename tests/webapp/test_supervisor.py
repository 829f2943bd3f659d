"""Trainers as processes: how they are started, handed over, stopped and killed. Real processes, real kills."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from tests.conftest import (
    Server,
    fixture_settings,
    kill_trainer,
    make_run,
    read_events,
    trainer_of,
    wait_for,
    writing,
)
from trainer_core import origin, run_dir
from trainer_core.config import RunConfig
from trainer_core.events import Finished, Phase
from trainer_core.run_dir import RunDir
from trainer_core.run_folders import RunFolders
from webapp import supervisor

LONG = {"epochs": 100_000}
CONFIG = RunConfig.model_validate(fixture_settings(training=LONG))


def form_of(**fields: str) -> dict[str, str]:
    """The fields of the page's form for a long run on the fixture."""
    settings = fixture_settings()
    return {
        "model.source": settings["model"]["source"],
        "dataset.source": settings["dataset"]["source"],
        "training.epochs": "100000",
        **fields,
    }


def one_run(server: Server) -> RunDir:
    wait_for(lambda: list(server.runs), "the run's folder")
    (run,) = server.runs
    return run


def freeze_launch(server: Server) -> tuple[RunDir, psutil.Process]:
    """The run that the server is starting, and its trainer, suspended before it has the run's lock."""
    run = one_run(server)
    wait_for(lambda: psutil.Process(server.process.pid).children(), "the trainer")
    (trainer,) = psutil.Process(server.process.pid).children()
    trainer.suspend()
    assert not run.is_alive()
    return run, trainer


def test_ten_starts_at_once_make_one_run_and_nine_refusals_that_name_it(server: Server) -> None:
    """G5."""
    with ThreadPoolExecutor(10) as pool:
        answers = list(
            pool.map(lambda _: server.http.post("/api/runs", json=fixture_settings(training=LONG)), range(10))
        )
    assert sorted(answer.status_code for answer in answers) == [201] + [409] * 9
    run = one_run(server)
    assert {answer.json().get("active", answer.json().get("id")) for answer in answers} == {run.id}
    assert trainer_of(run)


def test_a_form_that_is_sent_again_starts_one_run(server: Server) -> None:
    """G5: a double click, or a browser that sends again what got no answer."""
    form = form_of(form_token="abc")
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: server.http.post("/runs", data=form), range(4)))
    run = one_run(server)
    assert {(answer.status_code, answer.headers["location"]) for answer in answers} == {(303, f"/runs/{run.id}")}
    server.kill()
    server.start()
    assert server.http.post("/runs", data=form).headers["location"] == f"/runs/{run.id}"
    other = server.http.post("/runs?queue=true", data=form | {"training.epochs": "2"})
    assert other.status_code == 303
    assert len(list(server.runs)) == 2


def test_nobody_starts_a_second_trainer_while_the_first_is_still_coming_up(server: Server) -> None:
    """However long it takes to its lock: here it is frozen before."""
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(server.http.post, "/api/runs", json=fixture_settings(training=LONG))
        run, trainer = freeze_launch(server)
        second = pool.submit(server.http.post, "/api/runs", json=fixture_settings(training=LONG))
        assert server.http.get(f"/api/runs/{run.id}").json()["status"] == "queued"
        time.sleep(1)
        assert not second.done()
        trainer.resume()
        assert (first.result().status_code, second.result().status_code) == (201, 409)
    assert one_run(server).id == run.id


def test_a_server_killed_while_it_starts_a_trainer_leaves_the_run_queued_and_the_next_one_starts_it(
    server: Server,
) -> None:
    """G3, in the first instants."""
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(server.http.post, "/api/runs", json=fixture_settings(training=LONG))
        run, trainer = freeze_launch(server)
        server.kill()
        trainer.resume()
        with pytest.raises(Exception, match=r"disconnected|reset"):
            answer.result()
    trainer.wait(20)
    assert run.status() == "queued"
    assert not run.events.exists()
    server.start()
    wait_for(lambda: read_events(run), "the run's turn")
    assert run.status() == "starting"


@pytest.mark.parametrize("who", ["trainer", "both"])
def test_a_kill_while_loading_ends_in_the_truth(who: str, server: Server) -> None:
    """G3."""
    run = server.begin(training=LONG)
    assert run.status() == "starting"
    if who == "both":
        server.kill()
    kill_trainer(run)
    if who == "both":
        server.start()
    wait_for(lambda: server.http.get(f"/api/runs/{run.id}").json()["status"] == "crashed", "the truth", 3)
    stopped = server.http.post(f"/api/runs/{run.id}/stop")
    assert (stopped.status_code, stopped.json()["status"]) == (200, "crashed")
    assert not run.stop.exists()


def test_a_stop_while_loading_ends_at_once_and_twice_is_harmless(server: Server) -> None:
    """G7: long before PyTorch is imported."""
    run = server.begin(training=LONG)
    for _ in range(2):
        assert server.http.post(f"/runs/{run.id}/stop").status_code == 303
    wait_for(lambda: run.status() == "stopped", "the stop", 5)
    assert [event["type"] for event in read_events(run)] == ["phase", "finished"]
    wait_for(lambda: run.exit.exists(), "the exit")
    assert server.http.post("/api/runs", json=fixture_settings(training=LONG)).status_code == 201


def test_a_kill_amid_saving_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    trainer = supervisor.start(
        RunFolders(tmp_path),
        CONFIG.model_copy(update={"training": CONFIG.training.model_copy(update={"save_every_epochs": 1})}),
    )
    run = trainer.run
    wait_for(lambda: len(read_events(run, "checkpoint")) > 1, "two checkpoints", 60)
    wait_for(lambda: list(run.checkpoints.glob(".*.partial")), "a checkpoint that is being written")
    trainer.process.kill()
    trainer.record_exit()
    summary = run.summary()
    assert summary.status == "crashed"
    assert len(summary.checkpoints) >= len(read_events(run, "checkpoint")) >= 2
    assert f"It can go on from step {summary.checkpoints[-1].step}." in str(summary.message)
    for checkpoint in summary.checkpoints:
        assert origin.read_state(run.checkpoints / checkpoint.name).step == checkpoint.step


@pytest.mark.parametrize(
    ("kills", "expected"),
    [("oom_kill 8\n", "had run out of memory"), ("oom_kill 7\n", "by signal 9 (SIGKILL). No"), (None, "Often this is")],
)
def test_the_kernels_kill_for_memory_is_told_apart(
    kills: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The count stands in for the kernel's, which can't be made to run short here."""
    count = tmp_path / "vmstat"
    monkeypatch.setattr(supervisor, "OOM_KILLS", count)
    if kills:
        count.write_text("pgfault 3\noom_kill 7\n")
    trainer = supervisor.start(RunFolders(tmp_path / "home"), CONFIG)
    if kills:
        count.write_text("pgfault 4\n" + kills)
    trainer.process.kill()
    trainer.record_exit()
    assert expected in str(trainer.run.summary().message)


# Stands in for a trainer that hangs: with the lock, a child, and no ear for a stop.
HANGING = """
    import signal, subprocess, sys, time
    from filelock import FileLock

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    lock = FileLock(sys.argv[1] + "/alive.lock")
    if "bystander" not in sys.argv:
        lock.acquire()
    print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]).pid, flush=True)
    time.sleep(1000)
"""


def test_a_trainer_that_hangs_can_be_killed_after_the_grace_period_and_nobody_else_is(tmp_path: Path) -> None:
    """G3, G4: what is signalled has the run's own lock open, and its children don't survive it."""
    package = tmp_path / "trainer_core"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(textwrap.dedent(HANGING))
    run, other = make_run(tmp_path / "home"), make_run(tmp_path / "home")
    command = [sys.executable, "-m", "trainer_core"]
    arguments = [[str(run.path)], [str(other.path)], [str(run.path), "bystander"]]
    processes = [psutil.Popen([*command, *each], cwd=tmp_path, stdout=subprocess.PIPE, text=True) for each in arguments]
    children = [psutil.Process(int(process.stdout.readline())) for process in processes]
    try:
        with pytest.raises(supervisor.KillRefused, match="Stop it first"):
            supervisor.kill(run)
        run.request_stop()
        with pytest.raises(supervisor.KillRefused, match="may still be saving"):
            supervisor.kill(run)
        asked = time.time() - run_dir.GRACE_SECONDS
        os.utime(run.stop, (asked, asked))
        assert run.summary().may_kill
        supervisor.kill(run)
        assert processes[0].wait(5) == -signal.SIGKILL
        wait_for(lambda: not children[0].is_running(), "the end of its child", 5)
        assert not run.is_alive()
        assert other.is_alive()
        for survivor in (*processes[1:], *children[1:]):
            assert survivor.is_running()

        # One that hangs after its run's end.
        other.events.write_text('{"type":"finished","reason":"completed","message":"m","seq":1}\n')
        os.utime(other.events, (asked, asked))
        supervisor.kill(other)
        assert processes[1].wait(5) == -signal.SIGKILL
        assert other.status() == "completed"
        assert processes[2].is_running()
    finally:
        for process in (*processes, *children):
            if process.is_running():
                process.kill()
        for process in processes:
            process.wait(5)
            process.stdout.close()


def test_a_trainer_that_hangs_after_its_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "LEAVE_SECONDS", 0.2)
    runs, run = RunFolders(tmp_path), make_run(tmp_path)
    with writing(run) as writer:
        writer.write(Finished(reason="completed", message="m", step=1, epoch=1))
        with pytest.raises(supervisor.KillRefused, match="saving or leaving"):
            supervisor.kill(run)
        with pytest.raises(supervisor.RunActive, match="has ended, but its trainer still holds the device"):
            supervisor.start(runs, CONFIG)


def test_a_kill_over_http_is_refused_while_the_trainer_may_still_save(shared_server: Server) -> None:
    run = make_run(shared_server.home)
    with writing(run) as writer:
        writer.write(Phase(name="importing", message="m"))
        assert shared_server.http.post(f"/runs/{run.id}/kill").status_code == 409
        assert shared_server.http.post(f"/api/runs/{run.id}/stop").json()["status"] == "stopping"
        answer = shared_server.http.post(f"/api/runs/{run.id}/kill")
        assert answer.status_code == 409
        assert "may still be saving" in answer.json()["error"]


def test_a_start_waits_for_a_trainer_whose_run_has_ended_to_leave(tmp_path: Path) -> None:
    """It still has its device's memory."""
    runs = RunFolders(tmp_path)
    run = make_run(tmp_path)
    with writing(run) as writer:
        writer.write(Phase(name="importing", message="m"))
        with pytest.raises(supervisor.RunActive, match="fixture is being trained"):
            supervisor.start(runs, CONFIG)
    with ThreadPoolExecutor(1) as pool:
        with run.lock():
            run.events.write_text('{"type":"finished","reason":"completed","message":"m","seq":1}\n')
            starting = pool.submit(supervisor.start, runs, CONFIG)
            time.sleep(0.3)
            assert [each.id for each in runs] == [run.id]
        trainer = starting.result()
    trainer.process.kill()
    trainer.record_exit()
