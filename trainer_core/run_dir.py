"""A run is a folder. What state it is in is computed from the folder at every look and stored nowhere.

Covers: one run's status, summary and checkpoints, asking for a stop.
A process id is never written down, so none can be mistaken for another process: the lock tells who lives. A run whose
trainer has not yet taken the lock is still queued: a launch that dies before has changed nothing.
"""

import json
import math
import re
import shutil
import signal
import time
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import msgspec
from filelock import FileLock

from trainer_core.adapter_files import ADAPTER_FILES
from trainer_core.alive_lock import is_held
from trainer_core.config import RunConfig
from trainer_core.event_reader import parse_line
from trainer_core.origin import STATE_FILES
from trainer_core.sources import plain

Status = Literal["queued", "starting", "running", "stopping", "completed", "stopped", "aborted", "failed", "crashed"]
ACTIVE: tuple[Status, ...] = ("starting", "running", "stopping")
ENDINGS: tuple[Status, ...] = ("completed", "stopped", "aborted", "failed")

FULL_BYTES = 1 << 20
"""With less room than this a disk counts as full."""
GRACE_SECONDS = 20.0
"""How long a trainer may take that was asked to stop, or whose run has ended, before it may be killed."""
WINDOW_BYTES = 1 << 16
"""How much of an event file's start and end a summary reads, so that its cost does not grow with the run."""
LOG_TAIL_BYTES, LOG_TAIL_LINES = 1 << 13, 20

CHECKPOINT_NAME = re.compile(r"step-\d{6,}")


@dataclass(frozen=True)
class CheckpointInfo:
    """A complete checkpoint on disk. `bytes` is the size of the adapter's weights."""

    name: str
    step: int
    epoch: int
    bytes: int
    validation_loss: float | None
    resumable: bool
    """Whether it holds what an exact resume needs."""
    best: bool = False
    """Whether its validation loss is the lowest of the run's checkpoints."""


@dataclass(frozen=True)
class RunSummary:
    """What a list or a status request shows of a run; None where nothing is known yet."""

    id: str
    name: str
    status: Status
    active: bool
    created: float
    step: int
    total_steps: int | None
    epoch: int
    total_epochs: int | None
    loss: float | None
    message: str | None
    exit_status: int | None
    device: str
    """As it was chosen until the trainer has started, then the kind it is on, such as `cuda`."""
    may_kill: bool
    """Whether the trainer should have ended so long ago that it may be killed."""
    log_tail: list[str]
    checkpoints: list[CheckpointInfo]
    resume_from: str | None
    """The checkpoint this run continues exactly."""
    start_from: str | None
    """The adapter whose weights it began with."""


def explain(
    exit_status: int | None, out_of_memory: bool | None, was_stopping: bool, checkpoints: list[CheckpointInfo]
) -> str:
    """Why a trainer ended without a last word, as far as that can be seen, and the way on."""
    if exit_status is None:
        why = "The trainer ended unexpectedly; how is unknown, since the Descant that started it had ended."
    elif exit_status >= 0:
        why = f"The trainer ended unexpectedly with exit status {exit_status}."
    elif out_of_memory and not was_stopping:
        why = (
            "The trainer was killed, and the system had run out of memory. Turn on gradient checkpointing, take "
            "smaller batches or close other programs."
        )
    else:
        names = {number.value: f" ({number.name})" for number in signal.Signals}
        why = f"The trainer was killed by signal {-exit_status}{names.get(-exit_status, '')}"
        if was_stopping:
            why += " while it was stopping."
        elif exit_status == -9 and out_of_memory is None:
            why += ". Often this is the system running out of memory."
        else:
            why += "."
    steps = [checkpoint.step for checkpoint in checkpoints if checkpoint.resumable]
    return f"{why} {f'It can go on from step {steps[-1]}.' if steps else 'No checkpoint had been written.'}"


class RunDir:
    """One run's folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.id = path.name
        self.config = path / "config.json"
        self.events = path / "events.jsonl"
        self.log = path / "trainer.log"
        self.stop = path / "stop"
        self.checkpoints = path / "checkpoints"
        self.lock_path = path / "alive.lock"
        self.exit = path / "exit.json"
        """Written by the process that started the trainer and saw it end: nothing else can tell a kill from a crash."""

    def lock(self) -> FileLock:
        """The lock that the trainer holds as long as it lives."""
        return FileLock(self.lock_path)

    def is_alive(self) -> bool:
        """Whether a trainer holds the lock."""
        return is_held(self.lock_path)

    def status(self) -> Status:
        """The run's state, from its lock, its last event and the files beside them."""
        return self._look()[0]

    def _look(self) -> tuple[Status, dict[str, dict[str, Any]], bool]:
        """The status, the events it was read from, the newest of each type, and whether the trainer lives."""
        # The lock first: a trainer that finishes before its events are read has left its last line.
        alive = self.is_alive()
        newest = _newest(self.events)
        return self._status(alive, newest), newest, alive

    def _status(self, alive: bool, newest: dict[str, dict[str, Any]]) -> Status:
        last = next(iter(newest.values()), {})
        if last.get("type") == "finished" and last.get("reason") in ENDINGS:
            reason: Status = last["reason"]
            return reason
        if alive:
            if self.stop.exists():
                return "stopping"
            return "running" if "started" in newest else "starting"
        if self.was_begun():
            return "crashed"
        return "stopped" if self.stop.exists() else "queued"

    def is_queued(self) -> bool:
        """Whether the run waits for its turn; told without reading its events."""
        return not (self.was_begun() or self.stop.exists() or self.is_alive())

    def was_begun(self) -> bool:
        """Whether a trainer has ever been at work here. A power cut may take the events and leave a checkpoint."""
        return any(path.exists() for path in (self.events, self.exit, self.checkpoints))

    def summary(self) -> RunSummary:
        """The run as a list shows it. However long the run, only its ends are read."""
        status, newest, alive = self._look()
        step, started = newest.get("step", {}), newest.get("started", {})
        settings = self.settings()
        ended_badly = status in ("crashed", "failed")
        exit_status, out_of_memory = self._exit() if ended_badly else (None, None)
        checkpoints = self.list_checkpoints()
        message = newest.get("finished", {}).get("message")
        if status == "crashed":
            message = explain(exit_status, out_of_memory, self.stop.exists(), checkpoints)
        elif status == "stopped" and message is None:
            message = "Taken out of the queue before it began."
        elif status in ACTIVE and self._is_disk_full():
            message = "The disk is full. Nothing is lost so far; free some space, so that it can be written."
        return RunSummary(
            id=self.id,
            name=plain(str(settings.get("name", self.id))),
            status=status,
            active=status in ACTIVE,
            created=self.created,
            step=step.get("step") or max(0, int(_finite(started.get("first_step")) or 1) - 1),
            total_steps=started.get("total_steps"),
            epoch=step.get("epoch", 0),
            total_epochs=started.get("total_epochs"),
            loss=step.get("loss"),
            message=None if message is None else plain(str(message)),
            exit_status=exit_status,
            device=str(started.get("device") or _section(settings, "hardware").get("device", "auto")).partition(":")[0],
            may_kill=alive and (status == "stopping" or status in ENDINGS) and self._has_had_time(status),
            log_tail=self.log_tail() if ended_badly else [],
            checkpoints=checkpoints,
            resume_from=plain(str(settings.get("resume_from") or "")) or None,
            start_from=plain(str(settings.get("start_from") or "")) or None,
        )

    @property
    def created(self) -> float:
        """When the run was made, in seconds since 1970; 0 if it has just been deleted."""
        try:
            return self.config.stat().st_mtime
        except OSError:
            return 0.0

    def settings(self) -> dict[str, Any]:
        """The saved configuration as plain data; empty when it was damaged by hand."""
        try:
            # Stricter than the json module: what it lets pass can be sent on.
            settings = msgspec.json.decode(self.config.read_bytes())
        except (OSError, msgspec.MsgspecError, RecursionError):
            return {}
        return settings if isinstance(settings, dict) else {}

    def load_config(self) -> RunConfig:
        """The saved configuration. Raises pydantic's ValidationError or OSError when it was damaged."""
        return RunConfig.model_validate_json(self.config.read_text(encoding="utf-8"))

    def log_tail(self) -> list[str]:
        """The last lines the trainer printed."""
        older = self.log.with_name(f"{self.log.name}.1")  # by `log_cap`, which may have begun a new one this moment
        return [*_tail(older, LOG_TAIL_BYTES), *_tail(self.log, LOG_TAIL_BYTES)][-LOG_TAIL_LINES:]

    def list_checkpoints(self) -> list[CheckpointInfo]:
        """The complete checkpoints, oldest first."""
        found = []
        try:
            folders = list(self.checkpoints.iterdir())
        except OSError:  # none yet, or not to be read
            return []
        for folder in folders:
            try:
                if checkpoint := self.find_checkpoint(folder.name):
                    found.append(_checkpoint_info(checkpoint, checkpoint.stat().st_mtime_ns))
            # Deleted this moment, or damaged by hand.
            except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError):
                continue
        measured = [checkpoint for checkpoint in found if checkpoint.validation_loss is not None]
        best = min(measured, key=lambda checkpoint: (checkpoint.validation_loss, checkpoint.step), default=None)
        marked = [replace(checkpoint, best=True) if checkpoint is best else checkpoint for checkpoint in found]
        return sorted(marked, key=lambda checkpoint: checkpoint.step)

    def find_checkpoint(self, name: str) -> Path | None:
        """The folder of the complete checkpoint `name`, or None. Nothing outside the run is ever returned."""
        folder = self.checkpoints / name
        if not CHECKPOINT_NAME.fullmatch(name) or not is_inside(folder, self.path):
            return None
        return folder if all((folder / file).is_file() for file in (*ADAPTER_FILES, "state.json")) else None

    def request_stop(self) -> None:
        """Ask the trainer to save and stop, or take the run out of the queue; harmless when it has ended."""
        if self.status() in ("queued", "starting", "running"):  # again would put the grace period off
            self.stop.touch()

    def _is_disk_full(self) -> bool:
        """Whether the trainer can't write: then its own warnings don't come through."""
        try:
            return shutil.disk_usage(self.path).free < FULL_BYTES
        except OSError:
            return False

    def _has_had_time(self, status: Status) -> bool:
        """Whether the stop, or the end of a run that has ended, is so long ago that the trainer should be gone."""
        since = self.stop if status == "stopping" else self.events
        try:
            return time.time() - since.stat().st_mtime >= GRACE_SECONDS
        except OSError:
            return False

    def delete(self) -> None:
        """Remove the folder and all that is in it. Raises OSError where a file is held open, as Windows does."""
        # Under a name that no run has, so that a half-deleted folder is never shown.
        away = self.path.with_name(f".{self.id}.deleted")
        shutil.rmtree(away, ignore_errors=True)  # what a server that was killed has left
        shutil.rmtree(self.path.rename(away))

    def form_token(self) -> str:
        """That of the form the run was started with, so that a form that is sent twice starts one run."""
        try:
            return (self.path / "form_token").read_text(encoding="utf-8")
        except (OSError, ValueError):
            return ""

    def has_config(self, config: RunConfig) -> bool:
        """Whether the run was made from `config`."""
        return self.settings() == config.model_dump(mode="json")

    def record_exit(self, status: int, out_of_memory: bool | None) -> None:
        """Write down how the trainer's process ended: as in Python, a negative `status` is the signal that ended it.

        `out_of_memory` says whether the system killed it for want of memory, None where it does not tell.
        """
        self.exit.write_text(json.dumps({"status": status, "out_of_memory": out_of_memory}))

    def _exit(self) -> tuple[int | None, bool | None]:
        try:
            ended = json.loads(self.exit.read_text())
            return int(ended["status"]), ended["out_of_memory"] if isinstance(ended["out_of_memory"], bool) else None
        except (OSError, ValueError, TypeError, KeyError, OverflowError):  # nobody saw the end, or damaged by hand
            return None, None


@lru_cache(maxsize=4096)
def _checkpoint_info(folder: Path, changed: int) -> CheckpointInfo:
    """What a checkpoint's files tell. A complete one never changes, so a night's worth is read once."""
    state = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    return CheckpointInfo(
        name=folder.name,
        step=int(state["step"]),
        epoch=int(state["epoch"]),
        bytes=(folder / ADAPTER_FILES[1]).stat().st_size,
        validation_loss=_finite(state.get("validation_loss")),
        resumable=(folder / STATE_FILES[0]).is_file(),
    )


def _section(settings: dict[str, Any], name: str) -> dict[str, Any]:
    """A section of saved settings; empty when it was damaged by hand."""
    section = settings.get(name)
    return section if isinstance(section, dict) else {}


def _finite(value: Any) -> float | None:
    """A number as it was written, or None for whatever else stands there."""
    try:
        return value if isinstance(value, int | float) and math.isfinite(value) else None
    except OverflowError:  # a whole number of hundreds of digits
        return None


def is_inside(path: Path, folder: Path) -> bool:
    """Whether `path`, with its links followed, lies in `folder`."""
    try:
        return path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):  # a loop of links, as the Python version has it; a NUL
        return False


def _newest(path: Path) -> dict[str, dict[str, Any]]:
    """`started` from the start of a file, and from its end the newest of each type, back to the last step.

    The last event of all comes first. What is cut by the window or damaged is left out, and no line is parsed that is
    not needed: a list of many runs is looked at every two seconds.
    """
    try:
        with path.open("rb") as file:
            head = file.read(WINDOW_BYTES)
            end = file.seek(0, 2)
            file.seek(max(len(head), end - WINDOW_BYTES))
            cut = file.tell() > len(head)
            tail = file.read()
    except OSError:
        return {}
    lines = head.split(b"\n")[:-1] + tail.split(b"\n")[1:-1] if cut else (head + tail).split(b"\n")[:-1]
    newest: dict[str, dict[str, Any]] = {}
    for event in filter(None, map(parse_line, reversed(lines))):
        newest.setdefault(event["type"], event)
        if event["type"] == "step":
            break
    for event in filter(None, map(parse_line, lines)):
        if event["type"] == "started":
            newest.setdefault("started", event)
        if event["type"] in ("started", "step"):
            break
    return newest


def _tail(path: Path, most: int) -> list[str]:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, 2) - most))
            return file.read().decode(errors="replace").splitlines()
    except OSError:
        return []
