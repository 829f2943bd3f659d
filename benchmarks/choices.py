"""What each choice about memory and speed costs and spares: seconds of a step, and the trainer's own memory.

The model and a clip of `benchmarks.step_time`, in fp32 on the CPU; each choice is a trainer process of its own, in
turn. Memory is what was the process's own at its peak, with everything in it; what is mapped from files is not in it,
and so not a base in bf16, as the file has it. Compiling is measured over the steps after the graphs are made. Writes
README's table. Linux only. Run it on a machine that does nothing else with `.venv/bin/python -m benchmarks.choices`.
"""

import argparse
import statistics
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks import table
from benchmarks.random_model import write_model
from benchmarks.step_time import SHAPE, make_samples
from benchmarks.trainer import OWN, train

CHOICES: dict[str, dict[str, Any]] = {
    "nothing computed again, fp32 base": {},
    "every 4th block computed again": {"gradient_checkpointing": 4},
    "every 2nd block": {"gradient_checkpointing": 2},
    "all blocks (full)": {"gradient_checkpointing": "full"},
    "base in bf16": {"base_dtype": "bf16"},
    "full, base in bf16": {"gradient_checkpointing": "full", "base_dtype": "bf16"},
    "compile": {"compile": True},
}
STEPS = 4
"""Of a run, the first of which is not counted."""


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=240, help="length of the clip (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="runs of each (%(default)s)")
    options = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    peaks: dict[str, list[int]] = defaultdict(list)
    estimates: dict[str, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_model(home / "model", SHAPE)
        make_samples(home / "data", options.seconds, 1)
        for _ in range(options.turns):
            for name, choice in CHOICES.items():
                settings = {
                    "model": {"source": str(home / "model"), "base_dtype": choice.get("base_dtype", "fp32")},
                    "dataset": {"source": str(home / "data")},
                    "training": {
                        "epochs": STEPS,
                        "gradient_accumulation": 1,
                        "save_every_epochs": STEPS,
                        "gradient_checkpointing": choice.get("gradient_checkpointing", "off"),
                    },
                    "hardware": {"device": "cpu", "compile": choice.get("compile", False)},
                }
                trained = train(home, settings)
                times = [step["time"] for step in trained.of_type("step")]
                seconds[name].append(statistics.median(after - before for before, after in pairwise(times)))
                peaks[name].append(trained.most[OWN])
                estimates[name] = trained.of_type("started")[0]["estimated_bytes"]
                print(f"{name}: {seconds[name][-1]:.2f} s, {peaks[name][-1] / 1e9:.2f} GB", flush=True)

    first = next(iter(CHOICES))
    rows = []
    for name in CHOICES:
        ratios = [own / base for own, base in zip(seconds[name], seconds[first], strict=True)]
        peak, of_first = statistics.median(peaks[name]), statistics.median(peaks[first])
        rows.append(
            [
                name,
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
                f"{peak / 1e9:.2f} GB",
                f"{peak / of_first:.2f}",
                f"{estimates[name] / 1e9:.2f} GB",
            ]
        )
    head = ["choice", "time of a step (turns)", "memory at most", "of the first", "estimated, base included"]
    table.write("choices", head, rows)


if __name__ == "__main__":
    main()
