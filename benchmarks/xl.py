"""One epoch on the shape of ACE-Step 1.5 XL: does it fit a machine without a graphics card?

Random weights, one 240-second sample, rank 64, accumulation 4 (so that the only update is the remainder window), base
in bf16, gradient checkpointing. The trainer is the real process. Prints what it told of the run and the step, its
seconds, and its memory at most: its own (anonymous), and what was mapped from files, which the system may
drop. Linux only. Needs about 9 GB of disk in the temporary folder (TMPDIR) at full size. Run it with
`.venv/bin/python -m benchmarks.xl`.
"""

import argparse
import shutil
import tempfile
from pathlib import Path

from benchmarks.random_model import XL, write_model
from benchmarks.step_time import make_samples
from benchmarks.trainer import MAPPED, OWN, train


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=XL["num_hidden_layers"], help="of the model (%(default)s)")
    parser.add_argument("--seconds", type=int, default=240, help="length of the clip (%(default)s)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        home = Path(temporary)
        needed, free = 0.4e9 + 0.27e9 * options.layers, shutil.disk_usage(home).free
        if free < needed:
            parser.error(f"{home} has {free / 1e9:.1f} GB free, {needed / 1e9:.1f} are needed. Set TMPDIR.")
        size = write_model(home / "model", XL | {"num_hidden_layers": options.layers})
        print(f"{size / 2e6:.0f} million weights, {size / 1e9:.1f} GB in bf16", flush=True)
        make_samples(home / "data", options.seconds, 1, tokens=256, width=XL["encoder_hidden_size"])
        settings = {
            "model": {"source": str(home / "model"), "base_dtype": "bf16"},
            "dataset": {"source": str(home / "data")},
            "adapter": {"rank": 64, "alpha": 64},
            "training": {"epochs": 1, "gradient_accumulation": 4, "gradient_checkpointing": "full"},
            "hardware": {"device": "cpu"},
        }
        trained = train(home / "home", settings)
        print(*trained.of_type("started"), *trained.of_type("step"), *trained.of_type("finished"), sep="\n")
        own, mapped = (trained.most[kind] / 1e9 for kind in (OWN, MAPPED))
        print(f"{trained.seconds:.0f} s from start to end. At most {own:.2f} GB of its own and {mapped:.2f} GB mapped.")


if __name__ == "__main__":
    main()
