"""`python -m trainer_core RUN_DIR`: train one run folder. Exit status 0 for completed or stopped, else 1.

With `--wait` it takes the folder's lock and begins at a line on its standard input, which says when it was started, in
seconds since 1970: whoever starts it so knows that no second trainer can come between. If that process dies first, it
ends and leaves the folder as it was.
"""

import argparse
import contextlib
import gc
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import FrameType

from filelock import Timeout

from trainer_core import log_cap
from trainer_core.config import RunConfig
from trainer_core.events import Epoch, Event, EventWriter, Finished, Phase, Started, Step
from trainer_core.run_dir import RunDir

# A look at the run's status tries the lock for an instant; longer than this, another trainer has it.
LOCK_SECONDS = 5.0
OUT_OF_MEMORY = ("MPS backend out of memory", "can't allocate memory", "not enough memory")
WATCH_SECONDS = 0.2
"""Between looks at the log's size and, before the first step, at the stop file."""


def main() -> int:
    """Take the run's lock, train, and write down how it ended."""
    started = time.time()
    parser = argparse.ArgumentParser(prog="python -m trainer_core", description="Train one run folder.")
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--wait", action="store_true", help="begin at a line on the standard input")
    arguments = parser.parse_args()
    run = RunDir(arguments.run_dir.absolute())
    if not run.config.is_file():
        parser.error(f"{run.path} is not a run folder: it has no config.json.")
    try:
        with run.lock().acquire(timeout=LOCK_SECONDS):
            if run.events.exists():
                parser.error(f"{run.path} has run before; a run folder is used once. Start a new run.")
            if arguments.wait:
                line = sys.stdin.readline()
                if not line:
                    return 1
                started = float(line)
            with EventWriter(run.events) as writer:
                return train_and_record(run, writer, started)
    except Timeout:
        parser.error(f"{run.path} is being trained by another process.")


def train_and_record(run: RunDir, writer: EventWriter, started: float) -> int:
    """Train `run`; however it ends, short of a kill, the last line of its events says so.

    `started` is when this process was, in seconds since 1970.
    """
    step = epoch = 0
    is_loading = True
    begun = {"starting": started}
    """When each phase began."""
    writing = threading.RLock()

    def emit(event: Event) -> None:
        nonlocal step, epoch, is_loading
        if isinstance(event, Phase):
            begun.setdefault(event.name, time.time())
        if isinstance(event, Started):
            times = [*begun.values(), time.time()]
            event.phase_seconds = {
                name: round(end - begin, 3) for name, (begin, end) in zip(begun, pairwise(times), strict=True)
            }
        with writing:
            writer.write(event)
            is_loading = is_loading and not isinstance(event, Started | Finished)
        if isinstance(event, Started):
            step = event.first_step - 1  # what the run that is resumed has done
        if isinstance(event, Step):
            step, epoch = event.step, event.epoch
        elif not isinstance(event, Epoch):  # a night of steps would bury everything else in the log
            details = event.model_dump(exclude={"type", "seq", "time"})
            with contextlib.suppress(OSError):  # a full disk is no reason to stop training
                print(f"{event.type}:", ", ".join(f"{name} {value}" for name, value in details.items()), flush=True)

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        run.stop.touch()

    def watch() -> None:
        """Keep the log short, and stop at once while loading, whatever is being imported, read or downloaded."""
        while True:
            log_cap.rotate(run.log)
            with writing:
                if is_loading and run.stop.exists():
                    message = "Stopped before the first step; there was nothing to save."
                    emit(Finished(reason="stopped", message=message, step=0, epoch=0))
                    os._exit(0)
            time.sleep(WATCH_SECONDS)

    signal.signal(signal.SIGINT, ask_to_stop)
    signal.signal(signal.SIGTERM, ask_to_stop)

    # Before PyTorch is loaded. Threads that wait by spinning take the processor from those they wait for: with
    # one other busy program on two cores a step of the demo took more than ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

    emit(Phase(name="importing", message="Starting PyTorch"))
    threading.Thread(target=watch, daemon=True).start()
    try:
        train = import_train()
        finished = train(run, run.load_config(), emit)
    except Exception as error:
        traceback.print_exc()
        finished = Finished(reason="failed", message=describe(error), step=step, epoch=epoch)
    emit(finished)
    return 0 if finished.reason in ("completed", "stopped") else 1


def import_train() -> Callable[[RunDir, RunConfig, Callable[[Event], None]], Finished]:
    """The training loop, with all it needs imported: seconds, so this comes after the first event.

    Imports make some 800,000 objects that live as long as the process. The garbage collector would look through them
    again and again while they come, about a fifth of the time, and once more as the process ends.
    """
    gc.disable()
    from trainer_core.train import train

    gc.freeze()
    gc.enable()
    return train


def describe(error: Exception) -> str:
    """What went wrong, for the person."""
    if is_out_of_memory(error):
        first_line = str(error).partition("\n")[0]
        return (
            f"Out of memory: {first_line} Turn on gradient checkpointing, take smaller batches, a smaller rank or bf16 "
            "base weights, or close other programs."
        )
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


def is_out_of_memory(error: Exception) -> bool:
    """Whether memory was short: CUDA and XPU have a type for it, MPS and the CPU only say so in a RuntimeError."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(said in str(error) for said in OUT_OF_MEMORY)


if __name__ == "__main__":
    sys.exit(main())
