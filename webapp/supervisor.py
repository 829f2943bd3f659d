"""Starting trainers, one at a time. A trainer is a process of its own and outlives the server.

A restarted server finds a trainer again by its run's lock. What only the parent learns, how the process ended,
is written into the run folder by the process that started it.
"""

import contextlib
import os
import subprocess
import sys
import threading

from filelock import FileLock

from trainer_core.config import RunConfig
from trainer_core.run_dir import RunDir, RunFolders


class RunActive(Exception):
    """Another run is being trained; `run` is it."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(f"{run.summary().name} is being trained. Wait until it ends, or stop it first.")
        self.run = run


def start(runs: RunFolders, config: RunConfig) -> "tuple[RunDir, subprocess.Popen[bytes]]":
    """Make a run folder and start its trainer; the caller must `record_exit` the process.

    Raises RunActive while another run of the same home is being trained, whoever started it; OSError when the
    folder can't be written.
    """
    runs.path.mkdir(parents=True, exist_ok=True)
    with FileLock(runs.path / ".start.lock"):
        if active := runs.active():
            raise RunActive(active)
        run = runs.create(config)
        try:
            return run, _launch(run)
        except OSError:
            run.delete()
            raise


def start_in_background(runs: RunFolders, config: RunConfig) -> RunDir:
    """`start`, with the exit recorded when it comes."""
    run, process = start(runs, config)
    threading.Thread(target=record_exit, args=(run, process), daemon=True).start()
    return run


def record_exit(run: RunDir, process: "subprocess.Popen[bytes]") -> int:
    """Wait until the trainer ends and write its exit status into the run folder."""
    status = process.wait()
    with contextlib.suppress(OSError):  # the run was deleted meanwhile, or the disk is full: then it stays unknown
        run.exit_status.write_text(str(status))
    return status


def _launch(run: RunDir) -> "subprocess.Popen[bytes]":
    with run.log.open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer_core", str(run.path)],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
            # Away from this terminal: neither Ctrl-C there nor closing it may reach the trainer.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0)
            | getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
