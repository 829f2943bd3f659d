"""Starting trainers, one at a time. A trainer is a process of its own and outlives the server.

A restarted server finds a trainer again by its run's lock. What only the parent learns, how the process ended,
is written into the run folder by the server that started it.
"""

import os
import subprocess
import sys
import threading

from trainer_core.config import RunConfig
from trainer_core.run_dir import RunDir, RunFolders


class RunActive(Exception):
    """Another run is being trained; `run` is it."""

    def __init__(self, run: RunDir) -> None:
        super().__init__(f"{run.summary().name} is being trained. Wait until it ends, or stop it first.")
        self.run = run


class Supervisor:
    """Starts runs of one home folder."""

    def __init__(self, runs: RunFolders) -> None:
        self._runs = runs
        self._starting = threading.Lock()

    def start(self, config: RunConfig, in_terminal: bool = False) -> tuple[RunDir, "subprocess.Popen[bytes]"]:
        """Make a run folder and start its trainer, in the background or with its progress on this terminal.

        Someone must `record_exit` the process. Raises RunActive while another run is being trained.
        """
        with self._starting:
            if active := self._runs.active():
                raise RunActive(active)
            run = self._runs.create(config)
            return run, _launch(run, in_terminal)

    def start_in_background(self, config: RunConfig) -> RunDir:
        """`start`, with the exit recorded when it comes."""
        run, process = self.start(config)
        threading.Thread(target=record_exit, args=(run, process), daemon=True).start()
        return run


def record_exit(run: RunDir, process: "subprocess.Popen[bytes]") -> int:
    """Wait until the trainer ends and write its exit status into the run folder."""
    status = process.wait()
    if run.path.is_dir():  # it may have been deleted meanwhile
        run.exit_status.write_text(str(status))
    return status


def _launch(run: RunDir, in_terminal: bool) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "trainer_core", str(run.path)]
    with run.log.open("ab") as log:
        if in_terminal:
            return subprocess.Popen([*command, "--progress"])
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=os.environ | {"PYTHONUNBUFFERED": "1", "PYTHONUTF8": "1"},
            # Away from the server's terminal: Ctrl-C there must not reach the trainer.
            start_new_session=True,
            creationflags=getattr(subprocess, "CREATE_NEW_PROCESS_GROUP", 0),
        )
