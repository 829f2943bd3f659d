"""What the base weights take of the memory, by how they are held, each in a process of its own.

Counts, not times: the bytes of the weights, how much the process's own (anonymous) memory grows by loading them, and
the most it grows meanwhile, looked at every few milliseconds. What is mapped from the file is not in these: the system
may drop it. int8 and nf4 need the package bitsandbytes; here they are made on the CPU, to be counted. Linux only. Run
it with `.venv/bin/python -m benchmarks.base_weights`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from benchmarks.random_model import write_model
from benchmarks.trainer import OWN, memory_of
from trainer_core import model
from trainer_core.config import QUANTIZED, BaseDtype
from trainer_core.frozen_linear import QuantizedLinear

SHAPE: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 128,
}


def held_bytes(transformer: nn.Module) -> int:
    """The bytes of a transformer's weights, with the scales of quantised ones."""
    size = sum(tensor.nbytes for tensor in transformer.state_dict().values())
    for layer in transformer.modules():
        if isinstance(layer, QuantizedLinear):
            scale: Any = layer.scale
            scales = [scale] if isinstance(scale, Tensor) else [scale.absmax, scale.state2.absmax]
            size += sum(tensor.nbytes for tensor in (layer.packed, *scales))
    return int(size)


def load(folder: str, base_dtype: BaseDtype) -> dict[str, int]:
    """Load in this process, and count."""
    model.load("demo")  # what a first load sets up is no matter of the weights
    before = most = memory_of(os.getpid())[OWN]
    is_done = threading.Event()

    def watch() -> None:
        nonlocal most
        while not is_done.wait(0.002):
            most = max(most, memory_of(os.getpid())[OWN])

    watcher = threading.Thread(target=watch)
    watcher.start()
    loaded = model.load(folder, base_dtype=base_dtype)
    is_done.set()
    watcher.join()
    after = memory_of(os.getpid())[OWN]
    return {"held": held_bytes(loaded.transformer), "grown": after - before, "most": max(most, after) - before}


def measure(folder: Path, base_dtype: str) -> dict[str, int]:
    """Load the model in `folder` in a fresh process: bytes `held` as weights, `grown` by, and at `most` grown by."""
    command = [sys.executable, "-m", "benchmarks.base_weights", "--load", str(folder), base_dtype]
    return cast(dict[str, int], json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--load", nargs=2, metavar=("FOLDER", "BASE_DTYPE"), help="load it here and print the counts")
    options = parser.parse_args()
    if options.load:
        print(json.dumps(load(*options.load)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        size = write_model(folder, SHAPE)
        print(f"A file of {size / 2e6:.0f} million weights in bf16, {size / 1e6:.0f} MB. In MB:")
        print("| base weights | held | own memory grown by | at most by |\n|---|---|---|---|")
        for base_dtype in ("fp32", "bf16", *(QUANTIZED if find_spec("bitsandbytes") else ())):
            counts = measure(folder, base_dtype)
            print(
                f"| {base_dtype} | " + " | ".join(f"{count / 1e6:.0f}" for count in counts.values()) + " |", flush=True
            )


if __name__ == "__main__":
    main()
