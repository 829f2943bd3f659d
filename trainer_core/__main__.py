"""`python -m trainer_core RUN_DIR`: train one run folder. Exit status 0 for completed or stopped, else 1."""

import argparse
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
    parser.add_argument("--progress", action="store_true", help="show a progress bar")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.absolute())
    if not run.config.is_file():
        parser.error(f"{run.path} is not a run folder: it has no config.json.")
    try:
        with run.lock().acquire(timeout=LOCK_SECONDS):
            if run.events.exists():
                parser.error(f"{run.path} has run before; a run folder is used once. Start a new run.")
            with EventWriter(run.events) as writer:
                return train_and_record(run, writer, show_progress=arguments.progress)
    except Timeout:
        parser.error(f"{run.path} is being trained by another process.")


def train_and_record(run: RunDir, writer: EventWriter, show_progress: bool) -> int:
    """Train `run`; however it ends, short of a kill, the last line of its events says so."""
    show = ProgressBar().show if show_progress else print_event
    last = Step(step=0, epoch=0, loss=None, learning_rate=0, grad_norm=None, seconds=0, memory_bytes=0)

    def emit(event: Event) -> None:
        nonlocal last
        writer.write(event)
        last = event if isinstance(event, Step) else last
        show(event)

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        run.stop.touch()

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)

    emit(Phase(name="importing", message="Starting PyTorch"))
    try:
        from trainer_core.train import (
            train,
        )  # seconds of imports: after the first event, so that the page shows life

        finished = train(run, run.load_config(), emit)
    except Exception as error:
        traceback.print_exc()
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        finished = Finished(reason="failed", message=message, step=last.step, epoch=last.epoch)
    emit(finished)
    return 0 if finished.reason in ("completed", "stopped") else 1


def print_event(event: Event) -> None:
    """One line for the log; steps are in the events, and a night of them would bury everything else."""
    if not isinstance(event, Step | Epoch):
        print(event.model_dump_json(exclude={"seq", "time"}), flush=True)


class ProgressBar:
    """The run's events on a terminal."""

    def __init__(self) -> None:
        from tqdm import tqdm

        self._bar = tqdm(unit="step", dynamic_ncols=True)

    def show(self, event: Event) -> None:
        """Draw a step; print everything else that is worth a line."""
        match event:
            case Started():
                self._bar.reset(total=event.total_steps)
            case Step():
                self._bar.set_postfix(epoch=event.epoch, loss=event.loss, refresh=False)
                self._bar.update()
            case Finished():
                self._bar.close()
                print(f"{event.reason}: {event.message}", file=sys.stderr)
            case _:
                self._bar.write(event.model_dump_json(exclude={"seq", "time"}), file=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
