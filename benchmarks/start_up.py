"""From the start of a trainer process to its first step, by phases; its imports; what it holds once they are done.

Fresh processes in turn, so that what else the machine does falls on all alike. The imports are measured in processor
time, which says the same on a busy machine: the trainer's beside those it can't be without (PyTorch, diffusers'
transformer, PEFT), and both ways of the garbage collector. Linux only, for the memory. Run it with
`.venv/bin/python -m benchmarks.start_up`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

from trainer_core.config import RunConfig
from trainer_core.run_folders import RunFolders

NEEDED = "torch, diffusers' transformer, peft"
IMPORTS = {
    NEEDED: "from diffusers import AceStepTransformer1DModel; import peft",
    "torch alone": "import torch",
    "trainer, collector left on": "import trainer_core.train",
    "trainer": "from trainer_core.__main__ import import_train; import_train()",
}
MEASURE = """
import time
processor = time.process_time()
sizes = dict(line.split(":") for line in open("/proc/self/smaps_rollup") if ":" in line)
print(processor, sum(int(sizes[key].split()[0]) for key in ("Private_Clean", "Private_Dirty")), flush=True)
"""
DEMO = {"model": {"source": "demo"}, "dataset": {"source": "demo"}, "training": {"epochs": 1, "warmup_steps": 0}}


def start_demo(home: Path) -> dict[str, float]:
    """Seconds of each phase of a demo run, then of the first step and of the end of the process."""
    run = RunFolders(home).create(RunConfig.model_validate(DEMO))
    command = [sys.executable, "-m", "trainer_core", str(run.path), "--wait"]
    subprocess.run(command, input=f"{time.time()}\n", stdout=subprocess.DEVNULL, text=True, check=True)
    ended = time.time()
    events = [json.loads(line) for line in run.events.read_text(encoding="utf-8").splitlines()]
    first = {event["type"]: event for event in reversed(events)}
    phases: dict[str, float] = first["started"]["phase_seconds"]
    return phases | {
        "first step": first["step"]["time"] - first["started"]["time"],
        "end of the process": ended - first["finished"]["time"],
    }


def measure_imports(code: str) -> tuple[float, float, float]:
    """Of a process that only imports: processor seconds, seconds until it has ended after that, private MB."""
    with subprocess.Popen([sys.executable, "-c", code + MEASURE], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        processor, private = process.stdout.readline().split()
        began = time.perf_counter()
        process.wait()
    return float(processor), time.perf_counter() - began, int(private) / 1000


def main() -> None:
    """Measure and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each (%(default)s)")
    options = parser.parse_args()
    phases: dict[str, list[float]] = defaultdict(list)
    imports: dict[str, list[tuple[float, float, float]]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as home:
        for _ in range(options.rounds):
            for name, seconds in start_demo(Path(home)).items():
                phases[name].append(seconds)
            for name, code in IMPORTS.items():
                imports[name].append(measure_imports(code))

    medians = {name: statistics.median(seconds) for name, seconds in phases.items()}
    to_first_step = sum(medians.values()) - medians["end of the process"]
    print("| a demo run | seconds | share of Start to first step |\n|---|---|---|")
    for name, median in medians.items():
        print(f"| {name} | {median:.2f} | {median / to_first_step:.0%} |")
    print("\n| imports | processor seconds | ratio | seconds to end | private memory |\n|---|---|---|---|---|")
    for name, measured in imports.items():
        ratio = statistics.median(one[0] / base[0] for one, base in zip(measured, imports[NEEDED], strict=True))
        processor, end, private = (statistics.median(column) for column in zip(*measured, strict=True))
        print(f"| {name} | {processor:.2f} | {ratio:.2f} | {end:.2f} | {private:.0f} MB |")


if __name__ == "__main__":
    main()
