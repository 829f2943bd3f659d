"""The real trainer process, run to its end, with the most memory that it took. Linux only."""

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from trainer_core.config import RunConfig
from trainer_core.run_folders import RunFolders
from webapp.supervisor import TRAINER_ENVIRONMENT

OWN, MAPPED = "RssAnon", "RssFile"
LOOK_SECONDS = 0.02


@dataclass
class Trained:
    """A run that has ended."""

    seconds: float
    """From the start of the process to its end."""
    events: list[dict[str, Any]]
    most: dict[str, int]
    """Bytes at most, looked at every few milliseconds: OWN, and MAPPED from files, which the system may drop."""

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """The events of one type."""
        return [event for event in self.events if event["type"] == kind]


def train(home: Path, settings: dict[str, Any]) -> Trained:
    """Train with `settings` as a server does. Raises CalledProcessError where the process ends badly."""
    run = RunFolders(home).create(RunConfig.model_validate(settings))
    began = time.perf_counter()
    with run.log.open("wb") as log:
        trainer = subprocess.Popen(
            [sys.executable, "-m", "trainer_core", str(run.path)],
            env=TRAINER_ENVIRONMENT | os.environ,
            stdout=log,
            stderr=log,
        )
    most = {OWN: 0, MAPPED: 0}
    while trainer.poll() is None:
        for kind, size in memory_of(trainer.pid).items():
            most[kind] = max(most[kind], size)
        time.sleep(LOOK_SECONDS)
    seconds = time.perf_counter() - began
    events = [msgspec.json.decode(line) for line in run.events.read_bytes().splitlines()]
    if trainer.returncode:
        raise subprocess.CalledProcessError(trainer.returncode, trainer.args, run.log.read_text())
    return Trained(seconds, events, most)


def memory_of(process: int) -> dict[str, int]:
    """Bytes of a process now, OWN and MAPPED; empty when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(fields[kind].split()[0]) for kind in (OWN, MAPPED) if kind in fields}
