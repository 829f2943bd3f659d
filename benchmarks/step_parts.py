"""Where a step's time goes: matrix products, attention, the rest, drawing the batch, writing the events.

The trainer's own function in this process, on the model and clips of `benchmarks.step_time`, in fp32 on the CPU: once
under PyTorch's profiler, once counting the products' operations, once counting how often the host waits for the device.
What the machine can do is measured in the same process, as the product of two large square matrices. Writes README's
table. Run it on a machine that does nothing else with `.venv/bin/python -m benchmarks.step_parts`.
"""

import argparse
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import table
from benchmarks.random_model import write_model
from benchmarks.step_time import ALPHA, LEARNING_RATE, RANK, SHAPE, make_samples
from tests.trainer_core.host_waits import HostWaits
from trainer_core.batching import draw_batches
from trainer_core.config import RunConfig
from trainer_core.events import Event, EventWriter, Step
from trainer_core.products import prefers_onednn
from trainer_core.run_folders import RunFolders
from trainer_core.train import train

PRODUCTS = ("aten.mm", "aten.bmm", "aten.addmm", "mkldnn._linear_pointwise")
ATTENTION = "aten::_scaled_dot_product"
STEPS = 4
"""Of a run, the first of which is not counted."""
SIDE, PRODUCTS_TIMED = 2048, 10


def machine_rate() -> float:
    """Operations a second of a large fp32 product, which are two for each multiplication."""
    one, other = torch.randn(2, SIDE, SIDE)
    seconds = []
    for _ in range(PRODUCTS_TIMED):
        began = time.perf_counter()
        one @ other
        seconds.append(time.perf_counter() - began)
    return 2 * SIDE**3 / statistics.median(seconds)


def linear_operations(x: Sequence[int], weight: Sequence[int], *_: object, **__: object) -> int:
    """Operations of the product of x [..., in] and weight [out, in], which PyTorch's counter does not know."""
    return 2 * math.prod(x) * weight[0]


class Run:
    """A run of STEPS steps in this process; `watch` is on from the end of the first step to that of the last."""

    def __init__(self, home: Path, seconds: int, watch: AbstractContextManager[Any]) -> None:
        settings = {
            "model": {"source": str(home / "model")},
            "dataset": {"source": str(home / f"data-{seconds}")},
            "adapter": {"rank": RANK, "alpha": ALPHA},
            "training": {
                "epochs": 1,
                "gradient_accumulation": 1,
                "learning_rate": LEARNING_RATE,
                "warmup_steps": 0,
                "gradient_checkpointing": "off",
            },
            "hardware": {"device": "cpu"},
        }
        self._run = RunFolders(home).create(RunConfig.model_validate(settings))
        self._watch = watch
        self._began = self.seconds = self.drawing = self.writing = 0.0
        drawing = mock.patch("trainer_core.train.draw_batches", self._draw)
        with drawing, EventWriter(self._run.events) as writer:
            train(self._run, self._run.load_config(), lambda event: self._emit(writer, event))

    def _draw(self, *arguments: Any) -> Iterator[Any]:
        began = time.perf_counter()
        batches = list(draw_batches(*arguments))
        self.drawing += time.perf_counter() - began
        yield from batches

    def _emit(self, writer: EventWriter, event: Event) -> None:
        began = time.perf_counter()
        writer.write(event)
        self.writing += time.perf_counter() - began
        if isinstance(event, Step) and event.step == 1:
            self.drawing = self.writing = 0.0
            self._watch.__enter__()
            self._began = time.perf_counter()
        elif isinstance(event, Step) and event.step == STEPS:
            self.seconds = time.perf_counter() - self._began
            self._watch.__exit__(None, None, None)


def measure(home: Path, seconds: int) -> list[str]:
    """A row of the table."""
    profiler = profile(activities=[ProfilerActivity.CPU])
    run = Run(home, seconds, profiler)
    in_each = {event.key: event.self_cpu_time_total / 1e6 for event in profiler.key_averages()}
    products = sum(in_each.get(kernel.replace(".", "::"), 0.0) for kernel in PRODUCTS)
    attention = sum(took for name, took in in_each.items() if name.startswith(ATTENTION))
    uncounted = {torch.ops.mkldnn._linear_pointwise: linear_operations} if prefers_onednn() else {}
    counter = FlopCounterMode(display=False, custom_mapping=uncounted)
    Run(home, seconds, counter)
    counts = counter.get_flop_counts()["Global"]
    operations = sum(count for kernel, count in counts.items() if str(kernel) in PRODUCTS)
    waits = HostWaits()
    Run(home, seconds, waits)
    rate = machine_rate()
    return [
        f"{seconds} s",
        f"{products / run.seconds:.0%}",
        f"{operations / products / rate:.2f}",
        f"{operations / rate / run.seconds:.2f}",
        f"{attention / run.seconds:.0%}",
        f"{run.drawing / run.seconds:.2%}",
        f"{run.writing / run.seconds:.3%}",
        f"{waits.count / (STEPS - 1):.0f}",
    ]


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, nargs="+", default=[60, 240], help="lengths of the clips")
    options = parser.parse_args()
    head = [
        "clip",
        "matrix products, of a step",
        "their rate, of the machine's",
        "a step of them alone at that rate",
        "attention",
        "drawing the batch",
        "writing events",
        "waits for the device a step",
    ]
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_model(home / "model", SHAPE)
        for seconds in options.seconds:
            make_samples(home / f"data-{seconds}", seconds, STEPS)
        table.write("step parts", head, [measure(home, seconds) for seconds in options.seconds])


if __name__ == "__main__":
    main()
