"""`python -m trainer_core RUN_DIR`: train one run folder. Exit status 0 for completed or stopped, else 1."""

import argparse
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

from filelock import Timeout

from trainer_core.events import Epoch, Event, EventWriter, Finished, Phase, Started, Step
from trainer_core.run_dir import RunDir

# A look at the run's status tries the lock for an instant; longer than this, another trainer has it.
LOCK_SECONDS = 5.0


def main() -> int:
    """Take the run's lock, train, and write down how it ended."""
    parser = argparse.ArgumentParser(prog="python -m trainer_core", description="Train one run folder.")
    parser.add_argument("run_dir", type=Path)
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.absolute())
    if not run.config.is_file():
        parser.error(f"{run.path} is not a run folder: it has no config.json.")
    try:
        with run.lock().acquire(timeout=LOCK_SECONDS):
            if run.events.exists():
                parser.error(f"{run.path} has run before; a run folder is used once. Start a new run.")
            with EventWriter(run.events) as writer:
                return train_and_record(run, writer)
    except Timeout:
        parser.error(f"{run.path} is being trained by another process.")


def train_and_record(run: RunDir, writer: EventWriter) -> int:
    """Train `run`; however it ends, short of a kill, the last line of its events says so."""
    step = epoch = 0

    def emit(event: Event) -> None:
        nonlocal step, epoch
        writer.write(event)
        if isinstance(event, Started):
            step = event.first_step - 1  # what the run that is resumed has done
        if isinstance(event, Step):
            step, epoch = event.step, event.epoch
        elif not isinstance(event, Epoch):  # a night of steps would bury everything else in the log
            details = event.model_dump(exclude={"type", "seq", "time"})
            print(f"{event.type}:", ", ".join(f"{name} {value}" for name, value in details.items()), flush=True)

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        run.stop.touch()

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)

    # Before PyTorch is loaded. Threads that wait by spinning take the processor from those they wait for: with
    # one other busy program on two cores a step of the demo took more than ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    emit(Phase(name="importing", message="Starting PyTorch"))
    try:
        from trainer_core.train import (
            train,
        )  # seconds of imports: after the first event, so that the page shows life

        finished = train(run, run.load_config(), emit)
    except Exception as error:
        traceback.print_exc()
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        finished = Finished(reason="failed", message=message, step=step, epoch=epoch)
    emit(finished)
    return 0 if finished.reason in ("completed", "stopped") else 1


if __name__ == "__main__":
    sys.exit(main())
