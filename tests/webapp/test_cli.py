"""The `descant` command as a person types it."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.conftest import FIXTURE, Server, fixture_settings, make_run, read_events, wait_for
from trainer_core.run_folders import RunFolders


def descant(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "webapp.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


def test_a_port_in_use_is_named_with_the_way_out(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        outcome = descant("--home", tmp_path, "--port", str(port), "--no-open")
    assert outcome.returncode == 2
    assert f"Can't listen on 127.0.0.1:{port}: Address already in use" in outcome.stderr
    assert "--port" in outcome.stderr
    assert "Traceback" not in outcome.stderr


@pytest.mark.parametrize("port", ["-1", "70000"])
def test_a_port_out_of_range_is_refused(port: str, tmp_path: Path) -> None:
    outcome = descant("--home", tmp_path, f"--port={port}", "--no-open")
    assert outcome.returncode == 2
    assert "Traceback" not in outcome.stderr


def test_a_home_that_can_not_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = descant("--home", tmp_path / "file" / "home", "--no-open")
    assert outcome.returncode == 2
    assert f"Runs can't be kept in {tmp_path / 'file' / 'home'}: Not a directory" in outcome.stderr
    assert "--home" in outcome.stderr


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--host", "0.0.0.0"], "--host 0.0.0.0 lets other machines in, which needs a key"),
        (["--host", "::"], "ssh -L 8765:127.0.0.1:8765"),
        (["--host", ""], "lets other machines in"),
        (["--host", "example.com"], "lets other machines in"),
        (["--allow-host", "music.example"], "--allow-host music.example lets other machines in"),
        (["--host", "0.0.0.0", "--api-key", ""], "The API key has 0 characters; it takes 16 or more"),
        (["--api-key", "fifteen-letters"], "Make one with python -c"),
        (["--api-key", "sixteen letters!"], "without spaces"),
        (["--api-key", "sechzehnzeichen\u00e4"], "of ASCII"),
        (["--allow", "/no/such/folder"], "--allow /no/such/folder: there is no such folder."),
    ],
)
def test_what_would_let_anybody_in_is_refused(options: list[str], words: str, tmp_path: Path) -> None:
    outcome = descant("serve", *options, "--home", tmp_path, "--no-open")
    assert outcome.returncode == 2
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr


def test_train_runs_in_the_terminal_in_the_same_kind_of_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With names in any language, even where the terminal knows ASCII alone."""
    for name, value in {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}.items():
        monkeypatch.setenv(name, value)
    data = tmp_path / "données 音楽"
    shutil.copytree(FIXTURE / "tensors", data)
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps(fixture_settings(name="Лето 夏", dataset={"source": str(data)})), encoding="utf-8")
    outcome = descant("train", settings, "--home", tmp_path / "дом")
    assert outcome.returncode == 0, outcome.stderr
    assert "completed: Trained 6 steps" in outcome.stderr
    (run,) = RunFolders(tmp_path / "дом")
    assert (run.summary().status, run.summary().name) == ("completed", "Лето 夏")
    assert run.load_config().dataset.source == str(data)
    assert json.loads(run.exit.read_text())["status"] == 0
    assert [saved.step for saved in run.list_checkpoints()] == [6]


def test_ctrl_c_in_the_terminal_saves_and_stops(tmp_path: Path) -> None:
    settings = tmp_path / "config.json"
    settings.write_text(json.dumps(fixture_settings(training={"epochs": 100_000})))
    command = [sys.executable, "-m", "webapp.cli", "train", str(settings), "--home", str(tmp_path / "home")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    run = wait_for(lambda: next(iter(RunFolders(tmp_path / "home")), None), "a run folder")
    wait_for(lambda: read_events(run, "step"), "a step", 60)
    os.killpg(process.pid, signal.SIGINT)  # the whole foreground group, as a terminal does
    _, printed = process.communicate(timeout=20)
    assert process.returncode == 0, printed
    assert "stopped: Stopped after step" in printed
    assert run.status() == "stopped"
    assert run.list_checkpoints()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "can't be read: No such file"),
        ("{", "is not valid JSON"),
        ("[]", "config: There is no such field"),
        ('{"adapter": {"rank": 0}, "x": 1}', "adapter.rank: 0 was given; this takes a whole number from 1 to 1,024."),
    ],
)
def test_a_bad_configuration_is_refused_in_words(content: str | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    outcome = descant("train", tmp_path / "config.json", "--home", tmp_path / "home")
    assert outcome.returncode == 2
    assert message in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert not list(RunFolders(tmp_path / "home"))


def test_train_is_refused_while_another_run_is_active(server: Server, tmp_path: Path) -> None:
    run = server.begin(training={"epochs": 100_000})
    (tmp_path / "config.json").write_text(json.dumps(fixture_settings()))
    outcome = descant("train", tmp_path / "config.json", "--home", server.home)
    assert outcome.returncode == 2
    assert "fixture is being trained" in outcome.stderr
    assert [each.id for each in RunFolders(server.home)] == [run.id]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A run's checkpoint: ACE-Step's own adapter."""
    run = make_run(tmp_path, name="Funk")
    return Path(shutil.copytree(FIXTURE / "adapter", run.checkpoints / "step-000006"))


def test_export_writes_what_the_page_offers(checkpoint: Path, tmp_path: Path) -> None:
    outcome = descant("export", checkpoint, "--format", "comfyui", "--output", tmp_path)
    file = tmp_path / "funk-step-000006-comfyui-bf16.safetensors"
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == f"{file}: 96 tensors, {file.stat().st_size:,} bytes, comfyui, bf16\n"
    assert len(load_file(file)) == 96
    outcome = descant("export", checkpoint, "--precision", "fp32", "--output", tmp_path / "mine.zip")
    assert "64 tensors" in outcome.stdout
    assert zipfile.ZipFile(tmp_path / "mine.zip").namelist()[0] == "mine/HOW-TO-LOAD.txt"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["{checkpoint}/nothing"], "There is no file or folder"),
        (
            ["{checkpoint}", "--output", "{checkpoint}/adapter_config.json"],
            "is there already. Remove it, or give another",
        ),
        (["{checkpoint}", "--output", "{checkpoint}/no/such/folder.zip"], "can't be written"),
        (["{checkpoint}", "--format", "midi"], "invalid choice: 'midi'"),
        (["{checkpoint}", "--output", "x" * 300], "can't be written: File name too long"),
    ],
)
def test_what_can_not_be_exported_is_refused_in_words(arguments: list[str], words: str, checkpoint: Path) -> None:
    before = sorted(checkpoint.iterdir())
    outcome = descant("export", *(argument.format(checkpoint=checkpoint) for argument in arguments))
    assert outcome.returncode == 2
    assert words in outcome.stderr
    assert "Traceback" not in outcome.stderr
    assert sorted(checkpoint.iterdir()) == before
