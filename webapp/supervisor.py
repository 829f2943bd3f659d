"""Starting trainers, one a device, and killing those that won't stop. A trainer outlives the server.

A restarted server finds a trainer again by its run's lock. What only the parent learns, how the process ended,
is written into the run folder by the process that started it.
"""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from filelock import FileLock

from trainer_core.config import RunConfig
from trainer_core.run_dir import ENDINGS, GRACE_SECONDS, RunDir
from trainer_core.run_folders import RunFolders
from webapp.run_queue import RunQueue

LAUNCH_SECONDS = 60.0
"""How long a trainer may take to take its run's lock (an interpreter's start), however busy the machine."""
LEAVE_SECONDS = 10.0
"""How long a trainer may take to give its device's memory back: a start and a kill wait for it."""
RECORD_SECONDS = 1.0
"""How long a kill waits for the exit status to be written, for which there is nobody if another server started it."""
TRAINER_ENVIRONMENT = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""Large tensors in large pages: a step on the CPU takes some 5 % less. Only glibc, of Linux, looks at it."""
CAN_NOT_EXECUTE = 126
"""Exit status of a trainer that could not be started, as shells have it."""
OOM_KILLS = Path("/proc/vmstat")
"""Where Linux counts the processes that it has killed for want of memory."""


class RunActive(Exception):
    """Another run is being trained on the same device or waits for it; `run` is it."""

    def __init__(self, run: RunDir) -> None:
        summary = run.summary()
        if summary.status == "queued":
            message = f"{summary.name} waits in the queue. Queue this run behind it, or take that one out."
        elif summary.active:
            message = f"{summary.name} is being trained. Wait until it ends, stop it first, or queue this run."
        else:
            message = (
                f"{summary.name} has ended, but its trainer still holds the device. If it stays so, load its page "
                "again: it lets you end the trainer."
            )
        super().__init__(message)
        self.run = run


class KillRefused(Exception):
    """The trainer may not be killed; the message says why."""


class Trainer:
    """A trainer's process, as the one that started it sees it."""

    def __init__(self, run: RunDir) -> None:
        """Start the trainer of `run` and wait until it has the run's lock, or has ended. Raises OSError.

        It begins only when told so after that: if this process dies before, it ends and the run is still queued. So
        a trainer that is at work always has its lock, and nobody can start another meanwhile.
        """
        self.run = run
        self._oom_kills = _oom_kills()
        started = time.time()
        with run.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "trainer_core", str(run.path), "--wait"],
                stdin=subprocess.PIPE,
                cwd=Path(__file__).parent.parent,  # Python looks for modules there first
                stdout=log,
                stderr=subprocess.STDOUT,
                env=TRAINER_ENVIRONMENT | os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
                # Away from this terminal: neither Ctrl-C there nor closing it may reach the trainer.
                start_new_session=True,
                creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
                | getattr(subprocess, "CREATE_NO_WINDOW", 0),
            )
        assert self.process.stdin
        try:
            end = time.monotonic() + LAUNCH_SECONDS
            while not run.is_alive() and self.process.poll() is None:
                if time.monotonic() > end:
                    message = f"Descant ended this trainer, since it was not ready after {LAUNCH_SECONDS:.0f} s.\n"
                    with run.log.open("a", encoding="utf-8") as log:
                        log.write(message)
                    self.process.kill()
                    self.process.wait()
                time.sleep(0.02)
        except BaseException:  # Ctrl-C
            self.process.kill()
            self.process.wait()
            raise
        with contextlib.suppress(OSError):  # it has ended; its exit status tells
            self.process.stdin.write(f"{started}\n".encode())
            self.process.stdin.close()

    def record_exit(self) -> None:
        """Wait until the trainer ends and write into the run folder how."""
        status = self.process.wait()
        killed_for_memory = None
        if self._oom_kills is not None:
            killed_for_memory = status == -9 and _oom_kills() != self._oom_kills
        with contextlib.suppress(OSError):  # the run was deleted meanwhile, or the disk is full: then it stays unknown
            self.run.record_exit(status, killed_for_memory)

    def record_exit_in_background(self) -> None:
        """`record_exit`, while the server goes on; at once if it has ended, or it would look as if it were queued."""
        if self.process.poll() is None:
            threading.Thread(target=self.record_exit, daemon=True).start()
        else:
            self.record_exit()


def start(runs: RunFolders, config: RunConfig) -> Trainer:
    """Make a run folder and start its trainer; the caller has to record its exit.

    Raises RunActive while another run of the same home is being trained on the device, whoever started it; OSError
    when the folder can't be written or the process not be started.
    """
    with starting(runs):
        return _start(runs, config)


def start_in_background(runs: RunFolders, config: RunConfig, form_token: str = "") -> RunDir:
    """`start`, with the exit recorded when it comes; a form that is sent again gives the run that it started."""
    with starting(runs):
        if run := _sent_before(runs, config, form_token):
            return run
        trainer = _start(runs, config, form_token, RunQueue(runs).waiting())
        trainer.record_exit_in_background()
        return trainer.run


def enqueue(runs: RunFolders, config: RunConfig, form_token: str = "") -> RunDir:
    """Make a run folder that waits behind those that wait already; for a form as `start_in_background`.

    Raises OSError when it can't be written.
    """
    with starting(runs):
        if run := _sent_before(runs, config, form_token):
            return run
        run = runs.create(config, form_token)
        try:
            RunQueue(runs).add(run)
        except OSError:
            run.delete()
            raise
        return run


def start_queued(runs: RunFolders) -> None:
    """Start each waiting run whose turn it is: the first of those for a device that nobody trains on."""
    if not RunQueue(runs).waiting():  # before anything that takes longer: this is asked every second
        return
    with starting(runs):
        taken = [run.summary().device for run in runs.active()]
        for run in RunQueue(runs).waiting():
            device = run.summary().device
            is_free = not any(_may_be_one(device, other) for other in taken)
            taken.append(device)  # also by those that go on waiting, or later ones would overtake them
            if not is_free:
                continue
            try:
                Trainer(run).record_exit_in_background()
            except OSError as error:  # as without memory for a process; it does not hold up the next one
                with contextlib.suppress(OSError):
                    run.record_exit(CAN_NOT_EXECUTE, None)
                with contextlib.suppress(OSError):
                    run.log.write_text(f"The trainer could not be started: {error}.\n", encoding="utf-8")


def kill(run: RunDir) -> None:
    """End a trainer that was asked to stop and has not, or that hangs after the run's end, and what it has started.

    Raises KillRefused before GRACE_SECONDS are over, and where it could not be ended. Only a process that has the
    run's lock open is ever signalled.
    """
    summary = run.summary()
    if not summary.may_kill:
        raise KillRefused(
            "Only a run that is stopping can be ended without saving. Stop it first."
            if summary.status in ("starting", "running") or not run.is_alive()
            else "The trainer may still be saving or leaving. It can be ended once it has had "
            f"{GRACE_SECONDS:.0f} s for that."
        )
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if process.cmdline()[1:3] == ["-m", "trainer_core"] and _has_open(process, run.lock_path):
                for one in (process, *process.children(recursive=True)):
                    with contextlib.suppress(psutil.NoSuchProcess):
                        one.kill()
    end = time.monotonic() + LEAVE_SECONDS
    while run.is_alive() and time.monotonic() < end:  # not psutil's wait: it would take the exit status from `Trainer`
        time.sleep(0.02)
    end = time.monotonic() + RECORD_SECONDS
    while not run.exit.exists() and time.monotonic() < end:
        time.sleep(0.02)
    if run.is_alive():
        raise KillRefused("The trainer could not be ended. Its process may belong to another person of this machine.")


@contextlib.contextmanager
def starting(runs: RunFolders) -> Iterator[None]:
    """Held while runs are started or put in order, so that two servers over one home don't do so at once."""
    runs.path.mkdir(parents=True, exist_ok=True)
    with FileLock(runs.path / ".start.lock"):
        yield


def _start(runs: RunFolders, config: RunConfig, form_token: str = "", waiting: Sequence[RunDir] = ()) -> Trainer:
    """Start a run that goes before all others but those `waiting`, whose turn comes within a second."""
    end = time.monotonic() + LEAVE_SECONDS
    while holder := _holder(runs, config.hardware.device):
        if holder.status() not in ENDINGS or time.monotonic() > end:
            raise RunActive(holder)
        time.sleep(0.05)
    for other in waiting:
        if _may_be_one(other.summary().device, config.hardware.device):
            raise RunActive(other)
    run = runs.create(config, form_token)
    try:
        return Trainer(run)
    except BaseException:
        run.delete()
        raise


def _holder(runs: RunFolders, device: str) -> RunDir | None:
    """The run that is being trained on `device`, if any."""
    return next((run for run in runs.active() if _may_be_one(run.summary().device, device)), None)


def _may_be_one(device: str, other: str) -> bool:
    """Whether these are the same. Which one `auto` is only a trainer finds out: it may be any."""
    return device == other or "auto" in (device, other)


def _sent_before(runs: RunFolders, config: RunConfig, form_token: str) -> RunDir | None:
    """The run that this very form has started; with other settings it is another form, as after the Back button."""
    if not form_token:
        return None
    return next((run for run in runs if run.form_token() == form_token and run.has_config(config)), None)


def _has_open(process: psutil.Process, path: Path) -> bool:
    return any(path.samefile(file.path) for file in process.open_files() if Path(file.path).name == path.name)


def _oom_kills() -> int | None:
    """How many processes this system has killed for want of memory since it started; None where it doesn't say."""
    try:
        lines = OOM_KILLS.read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), None)
