"""What tests share: the fixture model, run folders, and a real server process on a free port."""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from trainer_core.config import RunConfig
from trainer_core.events import EventWriter, Started, Step
from trainer_core.run_dir import RunDir
from trainer_core.run_folders import RunFolders

# As the trainer sets it, for the tests that train in this process; before anything imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.pop("DESCANT_API_KEY", None)

FIXTURE = Path(__file__).parent / "fixtures" / "acestep-original-base"


def wait_for(condition: Callable[[], Any], what: str, seconds: float = 30) -> Any:
    """The first true value of `condition`; fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"waited {seconds} s in vain for {what}"
        time.sleep(0.05)
    return value


def read_events(run: RunDir, kind: str | None = None) -> list[dict[str, Any]]:
    """The run's events so far, those of one type if `kind` is given."""
    if not run.events.exists():
        return []
    complete = run.events.read_text(encoding="utf-8").rpartition("\n")[0]
    events = [json.loads(line) for line in complete.split("\n") if line]
    return [event for event in events if kind in (None, event["type"])]


def fixture_settings(**changes: Any) -> dict[str, Any]:
    """Settings of a quick run on the fixture model and its five samples, with some fields set otherwise."""
    settings: dict[str, Any] = {
        "name": "fixture",
        "model": {"source": str(FIXTURE / "checkpoint")},
        "dataset": {"source": str(FIXTURE / "tensors")},
        "adapter": {"rank": 4, "alpha": 8},
        "training": {"epochs": 2, "warmup_steps": 1},
        "hardware": {"device": "cpu"},
    }
    for name, value in changes.items():
        settings[name] = settings.get(name, {}) | value if isinstance(value, dict) else value
    return settings


def make_run(home: Path, **changes: Any) -> RunDir:
    """A new run folder with `fixture_settings`."""
    return RunFolders(home).create(RunConfig.model_validate(fixture_settings(**changes)))


class Server:
    """`descant serve` as a process, with `options`; with an `api_key` its client sends that."""

    def __init__(self, home: Path, *options: str, api_key: str | None = None) -> None:
        self.home = home
        self.options = options
        self.environment = {"DESCANT_API_KEY": api_key} if api_key else {}
        self.temporary = home.with_name("temporary")
        """Where it makes downloads, apart from those of other servers."""
        self.temporary.mkdir()
        self.runs = RunFolders(home)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.address = f"http://127.0.0.1:{self.port}"
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self.http = httpx.Client(base_url=self.address, timeout=30, headers=headers)
        self.start()

    def start(self) -> None:
        """Start the process and wait until it answers."""
        command = [sys.executable, "-m", "webapp.cli", "serve", "--no-open"]
        self.process = subprocess.Popen(
            [*command, "--home", str(self.home), "--port", str(self.port), *self.options],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=os.environ | {"TMPDIR": str(self.temporary)} | self.environment,
        )
        assert self.process.stdout
        assert b"Descant is at" in self.process.stdout.readline()

    def kill(self) -> None:
        """Kill the server without a chance to clean up."""
        self.process.kill()
        self.end()

    def end(self, seconds: float = 10) -> None:
        """Wait for the process, and let its pipe go."""
        self.process.wait(seconds)
        assert self.process.stdout
        self.process.stdout.close()

    def stop(self) -> None:
        """End the server as Ctrl-C does, and its run's trainer with it."""
        for run in self.runs:
            if run.is_alive():
                with contextlib.suppress(StopIteration, psutil.NoSuchProcess):  # it has just ended by itself
                    kill_trainer(run)
        self.http.close()
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        self.end()

    def begin(self, **changes: Any) -> RunDir:
        """Start a run on the fixture model over the API."""
        answer = self.http.post("/api/runs", json=fixture_settings(**changes))
        assert answer.status_code == 201, answer.text
        run = self.runs.find(answer.json()["id"])
        assert run
        return run


def trainer_of(run: RunDir) -> psutil.Process:
    """The run's trainer, found as a person would: by its command line."""
    command = ["-m", "trainer_core", str(run.path)]
    # Asked for here, the command lines are those of processes that have not ended meanwhile: other tests run beside.
    return next(each for each in psutil.process_iter(["cmdline"]) if (each.info["cmdline"] or [])[1:4] == command)


def kill_trainer(run: RunDir) -> None:
    """Kill the run's trainer as the system would, without a chance to clean up."""
    trainer_of(run).kill()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """A server over an empty home; it and its trainer are gone after the test."""
    server = Server(tmp_path / "home")
    yield server
    server.stop()


@pytest.fixture(scope="session")
def lasting_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests that train nothing."""
    server = Server(tmp_path_factory.mktemp("shared") / "home")
    yield server
    server.stop()


@pytest.fixture
def shared_server(lasting_server: Server) -> Iterator[Server]:
    """The lasting server, its home without runs before and after the test."""
    yield lasting_server
    for run in lasting_server.runs:
        run.delete()


@contextlib.contextmanager
def writing(run: RunDir) -> Iterator[EventWriter]:
    """The run's trainer as the server sees one: its lock and its events."""
    with run.lock(), EventWriter(run.events) as writer:
        yield writer


def started(**changes: Any) -> Started:
    """A `started` event, with some fields set otherwise."""
    event = Started(
        device="cpu",
        precision="32-true",
        variant="base",
        base_dtype="fp32",
        gradient_checkpointing="off",
        samples=5,
        validation_samples=0,
        total_epochs=3,
        total_steps=9,
        first_step=1,
        trainable_parameters=1000,
        adapted_modules=32,
    )
    return event.model_copy(update=changes)


def step(number: int, **changes: Any) -> Step:
    """A `step` event, with some fields set otherwise."""
    event = Step(step=number, epoch=1, loss=0.5, learning_rate=1e-4, grad_norm=1, seconds=0.1, memory_bytes=10**9)
    return event.model_copy(update=changes)


def append_steps(run: RunDir, first: int, losses: Iterable[float], **changes: Any) -> None:
    """Steps as `EventWriter` would write them, a hundred times as fast: the first is step and `seq` `first`."""
    line = step(first, **changes).model_dump_json().replace("%", "%%")
    for field, number in {"seq": "%d", "time": "%.6f", "step": "%d", "loss": "%.17g"}.items():
        line = re.sub(rf'"{field}":[^,]+', f'"{field}":{number}', line)
    began = time.time()
    with run.events.open("a", encoding="utf-8") as file:
        file.writelines(
            f"{line % (number, began + number / 1000, number, loss)}\n" for number, loss in enumerate(losses, first)
        )
