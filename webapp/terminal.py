"""A run followed in a terminal: the same trainer and run folder as from the page, its events as a progress bar."""

import json
import signal
import sys
import threading
from typing import Any

from tqdm import tqdm

from trainer_core.event_reader import EventReader
from trainer_core.run_dir import RunDir
from webapp.supervisor import Trainer

LOOK_SECONDS = 0.2


def follow(trainer: Trainer) -> int:
    """Show a run until it ends; 0 when it completed or was stopped, else 1.

    Ctrl-C saves and stops, a second one kills.
    """
    run = trainer.run
    print(f"Training in {run.path}", file=sys.stderr)

    is_interrupted = False

    def interrupt(*_: object) -> None:
        nonlocal is_interrupted
        if is_interrupted:
            trainer.process.kill()
            return
        is_interrupted = True
        print("Saving and stopping; press Ctrl-C again to end it without.", file=sys.stderr)
        run.request_stop()

    before = signal.signal(signal.SIGINT, interrupt)
    waiting = threading.Thread(target=trainer.record_exit)
    waiting.start()
    try:
        reader = EventReader(run.events)
        with tqdm(unit="step", dynamic_ncols=True) as bar:
            ended = False
            while not ended:
                waiting.join(LOOK_SECONDS)
                ended = not waiting.is_alive()  # before the events are read, so that none is missed
                while lines := reader.read():
                    for line in lines:
                        show(bar, json.loads(line))
    finally:
        signal.signal(signal.SIGINT, before)
    return report(run)


def show(bar: "tqdm[Any]", event: dict[str, Any]) -> None:
    """Draw a step; print what is worth a line."""
    match event["type"]:
        case "started":
            bar.reset(total=event["total_steps"])
            bar.initial = bar.n = bar.last_print_n = event["first_step"] - 1  # what a run that is resumed has done
            bar.refresh()
            bar.write(f"Ready after {sum(event['phase_seconds'].values()):.1f} s", file=sys.stderr)
        case "step":
            bar.set_postfix(epoch=event["epoch"], loss=event["loss"], refresh=False)
            bar.update()
        case "phase" | "warning":
            bar.write(event["message"], file=sys.stderr)
        case "skipped":
            bar.write(f"step {event['step']} skipped: {event['reason']}", file=sys.stderr)
        case "validation":
            loss = "not finite" if event["loss"] is None else f"{event['loss']:.4f}"
            bar.write(f"epoch {event['epoch']}: validation loss {loss}", file=sys.stderr)
        case "checkpoint":
            bar.write(f"checkpoint {event['name']}: {event['bytes']:,} bytes", file=sys.stderr)


def report(run: RunDir) -> int:
    """Print how the run ended and where its log is; returns the exit status for the terminal."""
    summary = run.summary()
    print(f"{summary.status}: {summary.message}", file=sys.stderr)
    if summary.log_tail:
        print(f"The trainer's log is {run.log}", file=sys.stderr)
    return 0 if summary.status in ("completed", "stopped") else 1
