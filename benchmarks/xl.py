"""One epoch on the shape of ACE-Step 1.5 XL: does it fit a machine without a graphics card?

Random weights, one 240-second sample, rank 64, accumulation 4 (so that the only update is the remainder window), base
in bf16, gradient checkpointing. The trainer is the real process. Prints how it ended, its seconds, and its memory at
most: all that was resident, and of that its own (anonymous) and what was mapped from files, which the system may drop.
Linux only. Needs about 9 GB of disk in the temporary folder (TMPDIR) at full size. Run it with
`.venv/bin/python -m benchmarks.xl`.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from benchmarks.random_model import XL, write_model
from trainer_core.config import RunConfig
from trainer_core.run_folders import RunFolders
from webapp.supervisor import TRAINER_ENVIRONMENT

KINDS = ("VmHWM", "RssAnon", "RssFile")


def memory(process: int) -> dict[str, int]:
    """A process's memory in bytes: most resident so far, own and mapped now; empty when it has ended."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return {}
    fields = dict(line.split(":", 1) for line in lines)
    return {kind: 1024 * int(fields[kind].split()[0]) for kind in KINDS if kind in fields}


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
        frames = 25 * options.seconds
        (home / "data").mkdir()
        sample = {
            "target_latents": torch.randn(frames, 64),
            "context_latents": torch.randn(frames, 128),
            "encoder_hidden_states": torch.randn(256, XL["encoder_hidden_size"]),
            "encoder_attention_mask": torch.ones(256),
        }
        torch.save(sample, home / "data" / "sample.pt")
        settings = {
            "model": {"source": str(home / "model"), "base_dtype": "bf16"},
            "dataset": {"source": str(home / "data")},
            "adapter": {"rank": 64, "alpha": 64},
            "training": {"epochs": 1, "gradient_accumulation": 4, "gradient_checkpointing": "full"},
            "hardware": {"device": "cpu"},
        }
        run = RunFolders(home / "home").create(RunConfig.model_validate(settings))
        began = time.perf_counter()
        trainer = subprocess.Popen(
            [sys.executable, "-m", "trainer_core", str(run.path)], env=TRAINER_ENVIRONMENT | os.environ
        )
        most = dict.fromkeys(KINDS, 0)
        while trainer.poll() is None:
            now = memory(trainer.pid)
            most = {kind: max(most[kind], now.get(kind, 0)) for kind in KINDS}
            time.sleep(0.05)
        seconds = time.perf_counter() - began
        told = ", ".join(
            f"{name} {most[kind] / 1e9:.2f} GB" for name, kind in zip(("resident", "own", "mapped"), KINDS, strict=True)
        )
        events = (run.path / "events.jsonl").read_text(encoding="utf-8").splitlines()
        print(*[line for line in events if '"type":"step"' in line or '"type":"finished"' in line], sep="\n")
        print(f"Ended with {trainer.returncode} after {seconds:.0f} s. At most: {told}.")


if __name__ == "__main__":
    main()
