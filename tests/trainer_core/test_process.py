"""`python -m trainer_core` as a real process."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.conftest import make_run, read_events, wait_for
from trainer_core.__main__ import describe, main
from trainer_core.run_dir import RunDir

LONG = {"epochs": 100_000}


def start(run: RunDir) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "trainer_core", str(run.path)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def signals() -> Iterator[None]:
    """The signal handlers, put back after a test that runs the trainer in this process."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def outcome(process: "subprocess.Popen[str]") -> tuple[int, str]:
    printed, _ = process.communicate(timeout=120)
    return process.returncode, printed


def test_a_run_completes_and_a_folder_is_used_once(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_run(tmp_path)
    monkeypatch.setattr(sys, "argv", ["trainer", str(run.path)])
    assert main() == 0
    assert "Trained 6 steps" in capsys.readouterr().out
    events = read_events(run)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    assert events[-1]["type"] == "finished"
    assert run.status() == "completed"

    before = run.events.read_bytes()
    with pytest.raises(SystemExit):
        main()
    assert "has run before" in capsys.readouterr().err
    assert run.events.read_bytes() == before


def test_a_run_that_another_process_trains_is_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.lock():
        status, printed = outcome(start(run))
        assert status != 0
        assert "being trained by another process" in printed
        assert not run.events.exists()


def test_an_interrupt_saves_and_stops(tmp_path: Path) -> None:
    """Both signals, to two trainers side by side."""
    numbers = (signal.SIGINT, signal.SIGTERM)
    runs = [make_run(tmp_path, training=LONG) for _ in numbers]
    processes = [start(run) for run in runs]
    for run in runs:
        wait_for(partial(read_events, run, "step"), "a step", 60)
    for run, process, number in zip(runs, processes, numbers, strict=True):
        process.send_signal(number)
        status, printed = outcome(process)
        assert status == 0, printed
        assert run.status() == "stopped"
        assert (
            run.list_checkpoints()[-1].step
            == read_events(run, "step")[-1]["step"]
            == read_events(run, "finished")[0]["step"]
        )


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"dataset": {"source": "/no/such/folder"}}, "There is no folder /no/such/folder."),
        ({"model": {"source": "/no/such/model"}}, "There is no folder /no/such/model."),
        ({"model": {"source": "demo"}}, "5 of 5 samples do not fit this model"),
        ({"hardware": {"device": "xpu"}}, "no xpu device"),
    ],
)
def test_what_can_not_be_trained_fails_with_its_reason(
    sections: dict[str, Any],
    message: str,
    tmp_path: Path,
    signals: None,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    run = make_run(tmp_path, **sections)
    monkeypatch.setattr(sys, "argv", ["trainer", str(run.path)])
    assert main() == 1
    printed = capfd.readouterr().err
    (finished,) = read_events(run, "finished")
    assert finished["reason"] == "failed"
    assert message in finished["message"]
    assert "Traceback" in printed
    assert run.status() == "failed"


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path) -> None:
    status, printed = outcome(start(RunDir(tmp_path)))
    assert status == 2
    assert "is not a run folder" in printed


def test_a_config_edited_into_nonsense_fails_with_its_reason(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    settings = json.loads(run.config.read_text())
    settings["adapter"]["rank"] = 0
    run.config.write_text(json.dumps(settings))
    monkeypatch.setattr(sys, "argv", ["trainer", str(run.path)])
    assert main() == 1
    assert "adapter.rank" in read_events(run, "finished")[0]["message"]


def test_what_can_not_be_written_fails_the_run_and_keeps_earlier_checkpoints(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the second checkpoint's name is taken by a file, for which no waiting helps."""
    run = make_run(tmp_path, training={"epochs": 3, "save_every_epochs": 1})
    run.checkpoints.mkdir()
    (run.checkpoints / "step-000006").touch()
    monkeypatch.setattr(sys, "argv", ["trainer", str(run.path)])
    assert main() == 1
    (finished,) = read_events(run, "finished")
    assert finished["reason"] == "failed"
    assert "NotADirectoryError" in finished["message"]
    assert (finished["step"], finished["epoch"]) == (6, 2)
    assert [saved.step for saved in run.list_checkpoints()] == [3]
    assert len(read_events(run, "checkpoint")) == 1


def test_a_full_disk_costs_no_step_no_event_and_not_the_last_checkpoint(tmp_path: Path) -> None:
    """A limit on the size of the trainer's files stands in for the disk: its writes fail in the same places."""
    run = make_run(tmp_path, training=LONG | {"save_every_epochs": 1})
    with run.log.open("wb") as log:
        process = psutil.Popen([sys.executable, "-m", "trainer_core", str(run.path)], stdout=log, stderr=log)
    wait_for(lambda: read_events(run, "checkpoint"), "a checkpoint", 60)
    process.rlimit(psutil.RLIMIT_FSIZE, (1000, psutil.RLIM_INFINITY))
    time.sleep(3)  # for some epochs, whose events wait in memory
    saved = run.list_checkpoints()
    run.request_stop()
    time.sleep(1)
    assert run.status() == "stopping"
    assert run.list_checkpoints() == saved
    process.rlimit(psutil.RLIMIT_FSIZE, (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY))
    assert process.wait(60) == 0

    events = read_events(run)
    assert [event["seq"] for event in events] == list(range(1, len(events) + 1))
    steps = [event["step"] for event in read_events(run, "step")]
    assert steps == list(range(1, len(steps) + 1))
    went_on, *_, waited = [event["message"] for event in read_events(run, "warning")]
    assert f"(File too large); that of step {saved[-1].step} is kept. Training goes on" in went_on
    assert "Trying again every 5 s: free some space." in waited
    assert run.status() == "stopped"
    assert run.list_checkpoints()[-1].step == steps[-1] > saved[-1].step
    assert list(run.checkpoints.glob(".*")) == []


FLOOD = r"""
import os, sys
from pathlib import Path
from trainer_core import log_cap

log_cap.MAX_BYTES = 100_000
log = Path(sys.argv[1])
for number in range(200_000):
    print(f"line {number}", flush=number % 1000 == 999)
    if number % 1000 == 999:
        log_cap.rotate(log)
os.write(2, b"the last words of a library in C\n")
"""


def test_a_log_that_floods_is_cut_at_its_start_and_keeps_its_end(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    with run.log.open("ab") as log:
        subprocess.run([sys.executable, "-c", FLOOD, run.log], stdout=log, stderr=log, check=True)
    older = run.log.with_name("trainer.log.1")
    assert sum(path.stat().st_size for path in (older, run.log)) < 300_000
    lines = (older.read_text() + run.log.read_text()).splitlines()
    assert lines[-1] == "the last words of a library in C"
    numbers = [int(line.removeprefix("line ")) for line in lines[:-1]]
    assert numbers == list(range(numbers[0], 200_000))
    run.events.touch()
    assert run.summary().log_tail == lines[-20:]


def test_what_each_phase_took_is_told_and_the_imports_are_left_to_themselves(tmp_path: Path) -> None:
    """From the moment it is told that it was started; nothing imported is looked through by the garbage collector."""
    run = make_run(tmp_path)
    began = time.time()
    code = (
        "import gc, sys; from trainer_core.__main__ import main; status = main(); "
        "print([name for name in ('prodigyopt', 'bitsandbytes', 'webapp') if name in sys.modules], gc.isenabled(), "
        "len(gc.get_objects()) < gc.get_freeze_count() / 4); sys.exit(status)"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code, str(run.path), "--wait"],
        input=f"{began - 100}\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert printed.splitlines()[-1] == "[] True True"
    [started] = read_events(run, "started")
    seconds = started["phase_seconds"]
    assert list(seconds) == ["starting", "importing", "loading_data", "loading_model"]
    assert sum(seconds.values()) == pytest.approx(started["time"] - began + 100, abs=0.1)
    phases = [event["time"] for event in read_events(run, "phase")[:3]]
    measured = [end - begin for begin, end in pairwise([*phases, started["time"]])]
    assert list(seconds.values())[1:] == pytest.approx(measured, abs=0.1)


def test_a_trainer_waits_for_the_word_of_who_started_it_and_leaves_no_trace_without(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    process = psutil.Popen([sys.executable, "-m", "trainer_core", str(run.path), "--wait"], stdin=subprocess.PIPE)
    wait_for(run.is_alive, "the lock")
    assert not run.events.exists()
    process.stdin.close()
    assert process.wait(20) == 1
    assert run.status() == "queued"


def test_a_lack_of_memory_is_told_apart() -> None:
    """The CPU's is real; the words of those for CUDA and MPS, which aren't here, are PyTorch's."""
    with pytest.raises(RuntimeError) as cpu:
        torch.empty(1 << 50)
    others = [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
        RuntimeError("MPS backend out of memory (MPS allocated: 18.07 GB). Tried to allocate 1.00 GB on private pool."),
        MemoryError(),
    ]
    for error in (cpu.value, *others):
        assert describe(error).startswith("Out of memory")
        assert "gradient checkpointing" in describe(error)
    assert "See documentation" not in describe(others[0])
    for error in (RuntimeError("shapes differ"), ValueError("memory 5 was given")):
        assert "Out of memory" not in describe(error)
