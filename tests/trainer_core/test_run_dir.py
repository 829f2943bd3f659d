import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_run
from trainer_core import run_dir
from trainer_core.adapter_files import ADAPTER_FILES
from trainer_core.config import RunConfig
from trainer_core.run_dir import RunDir, Status
from trainer_core.run_folders import RunFolders

STARTED = {"type": "started", "total_steps": 9, "total_epochs": 3}
STEP = {"type": "step", "step": 4, "epoch": 2, "loss": 0.5}


def write_events(run: RunDir, *events: dict[str, Any]) -> None:
    run.events.write_text("".join(json.dumps(event | {"seq": i}) + "\n" for i, event in enumerate(events, start=1)))


def write_checkpoint(run: RunDir, name: str, state: str) -> None:
    (run.checkpoints / name).mkdir(parents=True)
    for file in (*ADAPTER_FILES, "state.json"):
        (run.checkpoints / name / file).write_text(state)


def finished(reason: str) -> dict[str, Any]:
    return {"type": "finished", "reason": reason, "message": "m", "step": 4, "epoch": 2}


PHASE = {"type": "phase", "name": "importing", "message": "m"}


CHECKPOINT = "a checkpoint"
STOP = "stop"


@pytest.mark.parametrize(
    ("alive", "files", "exit_status", "events", "expected"),
    [
        # No trainer has been at work: it waits, whatever became of a launch.
        (False, [], None, None, "queued"),
        (False, ["trainer.log"], None, None, "queued"),
        (False, [STOP], None, None, "stopped"),
        (True, [], None, None, "starting"),
        (True, [], None, [], "starting"),
        (True, [], None, [PHASE], "starting"),
        (True, [], None, [PHASE, STARTED], "running"),
        (True, [CHECKPOINT], None, [PHASE, STARTED, STEP], "running"),
        (True, [STOP], None, None, "stopping"),
        (True, [STOP], None, [PHASE], "stopping"),
        (True, [STOP], None, [PHASE, STARTED, STEP], "stopping"),
        # A last word is the truth, while the process still ends and after.
        *[
            (alive, files, exit_status, [PHASE, STARTED, STEP, finished(reason)], reason)
            for reason, exit_status in (("completed", 0), ("stopped", 0), ("aborted", 1), ("failed", 1))
            for alive, files in ((True, []), (True, [STOP]), (False, []), (False, [STOP]))
        ],
        # Without one it was killed or fell, wherever it was.
        (False, [], None, [], "crashed"),
        (False, [], None, [PHASE], "crashed"),
        (False, [], None, [PHASE, STARTED], "crashed"),
        (False, [STOP], None, [PHASE, STARTED, STEP], "crashed"),
        (False, [STOP], -9, [PHASE], "crashed"),
        (False, [], -9, None, "crashed"),
        (False, [], 0, [PHASE, STARTED, STEP], "crashed"),
        (False, [CHECKPOINT], None, None, "crashed"),
        (False, [], None, [PHASE, finished("who knows")], "crashed"),
    ],
)
def test_the_status_is_computed_from_the_folder(
    alive: bool,
    files: list[str],
    exit_status: int | None,
    events: list[dict[str, Any]] | None,
    expected: Status,
    tmp_path: Path,
) -> None:
    run = make_run(tmp_path)
    for file in files:
        run.checkpoints.mkdir() if file == CHECKPOINT else (run.path / file).touch()
    if exit_status is not None:
        run.record_exit(exit_status, None)
    if events is not None:
        write_events(run, *events)
    with run.lock() if alive else contextlib.nullcontext():
        summary = run.summary()
    assert summary.status == expected
    assert summary.active == (expected in ("starting", "running", "stopping"))
    assert (summary.message is None) == (expected in ("queued", "starting", "running", "stopping"))


@pytest.mark.parametrize(
    ("changes", "states"),
    [
        (
            ["begin", PHASE, STARTED, STEP, finished("completed"), "end"],
            "starting starting running running completed completed",
        ),
        (["begin", PHASE, STOP, finished("stopped"), "end"], "starting starting stopping stopped stopped"),
        (["begin", PHASE, STARTED, STOP, STEP, "end"], "starting starting running stopping stopping crashed"),
        (["begin", PHASE, finished("failed"), "end"], "starting starting failed failed"),
        (
            ["begin", PHASE, STARTED, STEP, finished("aborted"), "end"],
            "starting starting running running aborted aborted",
        ),
        (["begin", "end", "begin", PHASE, "end"], "starting queued starting starting crashed"),
        (["begin", PHASE, STARTED, STEP, finished("failed"), "end"], "starting starting running running failed failed"),
        (["begin", PHASE, STARTED, STOP, finished("completed")], "starting starting running stopping completed"),
        (["begin", PHASE, STARTED, STOP, finished("aborted")], "starting starting running stopping aborted"),
        (["begin", PHASE, STARTED, STOP, finished("failed")], "starting starting running stopping failed"),
        ([STOP], "stopped"),
    ],
)
def test_a_run_goes_from_state_to_state(changes: list[Any], states: str, tmp_path: Path) -> None:
    """Each state as a folder is left by what a trainer does next; `end` is its death, at any moment."""
    run = make_run(tmp_path)
    assert run.status() == "queued"
    lock, seen, events = run.lock(), [], []
    for change in changes:
        match change:
            case "begin":
                lock.acquire()
            case "end":
                lock.release()
            case "stop":
                run.request_stop()
            case event:
                events.append(event)
                write_events(run, *events)
        seen.append(run.status())
    assert " ".join(seen) == states


@pytest.mark.parametrize(
    ("exit_status", "out_of_memory", "was_stopping", "expected"),
    [
        (None, None, False, "how is unknown"),
        (3, None, False, "exit status 3."),
        (-9, True, False, "killed, and the system had run out of memory"),
        (-9, True, True, "signal 9 (SIGKILL) while it was stopping."),
        (-9, None, False, "SIGKILL). Often this is the system running out of memory."),
        (-9, False, False, "signal 9 (SIGKILL)."),
        (-9, False, True, "signal 9 (SIGKILL) while it was stopping."),
        (-11, False, False, "signal 11 (SIGSEGV)."),
        (-64, None, False, "signal 64"),
    ],
)
def test_a_crash_is_explained_with_the_way_on(
    exit_status: int | None, out_of_memory: bool | None, was_stopping: bool, expected: str
) -> None:
    saved = run_dir.CheckpointInfo("step-000012", 12, 2, 1, None, resumable=True)
    useless = run_dir.CheckpointInfo("step-000013", 13, 2, 1, None, resumable=False)
    words = run_dir.explain(exit_status, out_of_memory, was_stopping, [saved, useless])
    assert expected in words
    assert words.endswith("It can go on from step 12.")
    assert run_dir.explain(exit_status, out_of_memory, was_stopping, []).endswith("No checkpoint had been written.")


def test_checkpoints_stand_in_the_order_of_their_steps(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for number in (9, 10, 999_999, 1_000_000):
        write_checkpoint(run, f"step-{number:06d}", f'{{"step": {number}, "epoch": 1}}')
    assert [saved.step for saved in run.list_checkpoints()] == [9, 10, 999_999, 1_000_000]


def test_a_summary_tells_what_the_list_shows(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, PHASE, STARTED, STEP, finished("completed"))
    summary = run.summary()
    assert (summary.id, summary.name, summary.status) == (run.id, "fixture", "completed")
    assert (summary.step, summary.total_steps, summary.epoch, summary.total_epochs) == (4, 9, 2, 3)
    assert (summary.loss, summary.message, summary.exit_status, summary.log_tail) == (0.5, "m", None, [])


def test_a_summary_of_a_long_run_reads_only_its_ends(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, STARTED, *[STEP | {"step": number} for number in range(1, 5001)])
    assert run.events.stat().st_size > 2 * run_dir.WINDOW_BYTES
    summary = run.summary()
    assert (summary.step, summary.total_steps) == (5000, 9)


@pytest.mark.parametrize("size", [run_dir.WINDOW_BYTES + extra for extra in (-1, 0, 1, 70, 500)])
def test_the_ends_meet_without_loss_at_any_size(size: int, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    line = json.dumps({"type": "warning", "message": ""})
    first = json.dumps(STARTED)
    filler = size - len(first) - 1 - len(line) - 1 - len(json.dumps(STEP)) - 1
    run.events.write_text(f"{first}\n{line[:-2]}{'x' * filler}{line[-2:]}\n{json.dumps(STEP)}\n")
    assert run.events.stat().st_size == size
    assert (run.summary().step, run.summary().total_steps) == (4, 9)


def test_a_half_written_last_line_is_ignored(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, STARTED, STEP)
    with run.events.open("a") as file:
        file.write('{"type": "finis')
    assert run.summary().step == 4


def test_a_crash_shows_the_exit_status_and_the_last_log_lines(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, PHASE)
    run.log.write_text("".join(f"line {number}\n" for number in range(5000)))
    run.record_exit(-9, None)
    summary = run.summary()
    assert (summary.status, summary.exit_status) == ("crashed", -9)
    assert summary.log_tail[-1] == "line 4999"
    assert len(summary.log_tail) == run_dir.LOG_TAIL_LINES


@pytest.mark.parametrize(
    "run_id",
    [
        "",
        ".",
        "..",
        "../outside",
        "a/b",
        "..\\outside",
        "/etc",
        "C:",
        "a\0b",
        "%2e%2e",
        "link",
        "looping",
        "x" * 300,
        "é" * 200,
    ],
)
def test_no_id_leads_out_of_the_runs(run_id: str, tmp_path: Path) -> None:
    home, outside = tmp_path / "home", tmp_path / "outside"
    make_run(home)
    outside.mkdir()
    (outside / "config.json").write_text("{}")
    (home / "runs" / "link").symlink_to(outside)
    (home / "runs" / "looping").symlink_to(home / "runs" / "looping")
    assert RunFolders(home).find(run_id) is None
    assert [run.name for run in (home / "runs").iterdir() if RunFolders(home).find(run.name)] == [
        run.id for run in RunFolders(home)
    ]


@pytest.mark.parametrize(
    "name", ["", "..", "../..", "step-1", "step-000001/..", ".step-000001.partial", "step-000009", "link"]
)
def test_no_checkpoint_name_leads_out_of_the_run(name: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    whole = run.checkpoints / "step-000001"
    whole.mkdir(parents=True)
    for file in (*ADAPTER_FILES, "state.json"):
        (whole / file).write_text('{"step": 1, "epoch": 1}')
    (tmp_path / "elsewhere").mkdir()
    (run.checkpoints / "step-000009").symlink_to(tmp_path / "elsewhere")
    assert run.find_checkpoint("step-000001") == whole
    assert run.find_checkpoint(name) is None
    (whole / "adapter_config.json").unlink()
    assert run.find_checkpoint("step-000001") is None


def test_runs_of_one_second_and_name_get_folders_of_their_own(tmp_path: Path) -> None:
    ids = [make_run(tmp_path).id for _ in range(5)]
    assert len(set(ids)) == 5
    assert [run.id for run in RunFolders(tmp_path)] == sorted(ids, reverse=True)


@pytest.mark.parametrize("name", ["Ünïcödé 音楽", "../../etc/passwd", "???", "a" * 80, "CON", "nul.txt"])
def test_any_name_makes_a_folder_inside_the_home(name: str, tmp_path: Path) -> None:
    settings = {"name": name}
    run = RunFolders(tmp_path).create(RunConfig.model_validate(settings))
    assert run.path.parent == tmp_path / "runs"
    found = RunFolders(tmp_path).find(run.id)
    assert found
    assert found.summary().name == name


def test_a_stop_is_harmless_once_a_run_has_ended(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, PHASE)
    run.request_stop()
    assert not run.stop.exists()


def test_a_full_disk_is_told_while_the_trainer_can_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk is not at hand: what the system says of it stands in."""
    run = make_run(tmp_path)
    usage = shutil.disk_usage(tmp_path)
    with run.lock():
        assert run.summary().message is None
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=4096))
        assert "The disk is full" in str(run.summary().message)


def test_many_looks_at_once_take_none_of_each_other_for_a_trainer(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, PHASE)
    run.lock_path.touch()
    look = "import sys; from trainer_core.run_dir import *; run = RunDir(Path(sys.argv[1]));"
    look += "print({run.status() for _ in range(3000)})"
    command = [sys.executable, "-c", look, str(run.path)]
    looking = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    assert [process.communicate()[0].strip() for process in looking] == ["{'crashed'}"] * 3
    with run.lock():
        assert run.status() == "starting"


@pytest.mark.parametrize("field", ['"loss":1e999', '"loss":NaN', '"device":"\\ud800"', '"total_steps":1e999'])
def test_an_event_that_can_not_be_sent_on_is_left_out(field: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.events.write_text('{"type":"started","seq":1,' + field + '}\n{"type":"step","seq":2,"step":7,' + field + "}\n")
    summary = run.summary()
    assert json.loads(json.dumps(dataclasses.asdict(summary), allow_nan=False))["step"] == 0
    json.dumps(dataclasses.asdict(summary), ensure_ascii=False).encode()


def test_a_delete_that_was_cut_off_is_finished_by_the_next(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (run.path.with_name(f".{run.id}.deleted") / "left").mkdir(parents=True)
    run.delete()
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_stop_asked_for_twice_is_as_old_as_the_first(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.lock():
        run.request_stop()
        assert not run.summary().may_kill
        asked = time.time() - run_dir.GRACE_SECONDS
        os.utime(run.stop, (asked, asked))
        run.request_stop()
        assert run.summary().may_kill
    assert not run.summary().may_kill


def test_a_folder_copied_by_hand_is_a_run_like_any_other(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    write_events(run, STARTED, STEP, finished("completed"))
    shutil.copytree(run.path, run.path.with_name(f"{run.id} (copy)"))
    copy, original = RunFolders(tmp_path)
    assert (copy.id, copy.status()) == (f"{run.id} (copy)", "completed")
    assert original.id == run.id


def test_a_damaged_config_does_not_hide_the_other_runs(tmp_path: Path) -> None:
    run, other = make_run(tmp_path), make_run(tmp_path)
    run.config.write_text("{broken")
    assert {summary.name for summary in (each.summary() for each in RunFolders(tmp_path))} == {run.id, "fixture"}
    assert other.settings()["name"] == "fixture"


@pytest.mark.parametrize("first_step", [None, "x", [1], 1e400, 10**400, -5])
def test_an_odd_event_does_not_hide_the_run(first_step: Any, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    line = json.dumps({"type": "started", "seq": 1, "first_step": first_step})
    run.events.write_text(line.replace("Infinity", "1e400") + "\n")
    assert run.summary().step == 0


@pytest.mark.parametrize("loss", ["NaN", "1e400", '"x"', "[1]", "{}", "1" * 400])
def test_an_odd_validation_loss_is_none(loss: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for step, content in ((1, loss), (2, "0.5"), (3, loss)):
        state = f'{{"step": {step}, "epoch": 1, "validation_loss": {content}}}'
        write_checkpoint(run, f"step-{step:06d}", state)
    found = run.list_checkpoints()
    assert [saved.validation_loss for saved in found] == [None, 0.5, None]
    assert [saved.best for saved in found] == [False, True, False]


@pytest.mark.parametrize(
    "state",
    [
        '{"step": null, "epoch": 1}',
        '{"step": 1e400, "epoch": 1}',
        '{"step": "x", "epoch": 1}',
        "[]",
        "{",
        "[" * 100_000,
    ],
)
def test_a_damaged_checkpoint_does_not_hide_the_whole_ones(state: str, tmp_path: Path) -> None:
    run = make_run(tmp_path)
    for name, content in (("step-000001", '{"step": 1, "epoch": 1}'), ("step-000002", state)):
        write_checkpoint(run, name, content)
    assert [saved.name for saved in run.summary().checkpoints] == ["step-000001"]
