"""`python -m trainer_core` as a real process."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import make_run, read_events, wait_for
from trainer_core.__main__ import main
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


def test_a_full_disk_fails_the_run_with_its_reason_and_keeps_earlier_checkpoints(
    tmp_path: Path, signals: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that can't be made stands in for the disk: the second checkpoint's name is taken by a file."""
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
