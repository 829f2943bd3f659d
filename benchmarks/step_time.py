"""A step of the trainer beside the barest loop that learns the same, for clips of several lengths.

Both train the same LoRA on the same made-up model and samples in fp32 on the CPU, without gradient checkpointing,
each in a process of its own, in turn. The trainer is the real process as a server starts it, with its large pages, its
guard, its look at the stop file and its events on disk; the barest loop is diffusers' model and PEFT's layers as they
are. Writes README's table. Run it on a machine that does nothing else with
`.venv/bin/python -m benchmarks.step_time`.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from diffusers import AceStepTransformer1DModel
from peft import LoraConfig, inject_adapter_in_model
from torch.nn.utils import clip_grad_norm_

from benchmarks import table
from benchmarks.random_model import write_model
from benchmarks.trainer import train
from trainer_core.events import Step

WIDTH, TOKENS = 512, 64
SHAPE: dict[str, Any] = {
    "hidden_size": WIDTH,
    "intermediate_size": 3 * WIDTH,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
}
"""The original's proportions."""
LEARNING_RATE, RANK, ALPHA = 1e-4, 16, 32
# Seconds of a clip: turns of each, and steps a turn, the first of which is not counted.
LENGTHS = {60: (5, 5), 240: (3, 2), 600: (2, 2)}


def make_samples(folder: Path, seconds: int, count: int, tokens: int = TOKENS, width: int = WIDTH) -> None:
    """Tensor files of made-up samples of one length, their conditions `tokens` long and `width` wide."""
    folder.mkdir()
    frames = seconds * 25
    for number in range(count):
        tensors = {
            "target_latents": torch.randn(frames, 64),
            "context_latents": torch.randn(frames, 128),
            "encoder_hidden_states": torch.randn(tokens, width),
            "encoder_attention_mask": torch.ones(tokens),
        }
        torch.save(tensors, folder / f"{number}.pt")


def run_bare(model: Path, data: Path) -> None:
    """The barest loop: one pass over the samples, one sample an update. Prints the seconds of each."""
    transformer = AceStepTransformer1DModel.from_pretrained(model, torch_dtype=torch.float32).train()
    transformer.requires_grad_(False)
    adapted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    inject_adapter_in_model(adapted, transformer)
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    for sample in [torch.load(path) for path in sorted(data.glob("*.pt"))]:
        began = time.perf_counter()
        latents = sample["target_latents"][None]
        noise, t = torch.randn_like(latents), torch.rand(1)
        prediction = transformer(
            hidden_states=t * noise + (1 - t) * latents,
            timestep=t,
            timestep_r=t,
            encoder_hidden_states=sample["encoder_hidden_states"][None],
            context_latents=sample["context_latents"][None],
            return_dict=False,
        )[0]
        torch.nn.functional.mse_loss(prediction, noise - latents).backward()  # type: ignore[no-untyped-call]
        clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(time.perf_counter() - began, flush=True)


def time_bare(home: Path, data: Path) -> list[float]:
    """Seconds of each update of the barest loop but the first."""
    command = [sys.executable, "-m", "benchmarks.step_time", "--bare", str(home / "model"), str(data)]
    environment = os.environ | {"OMP_WAIT_POLICY": "PASSIVE"}  # as the trainer has it
    printed = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return [float(line) for line in printed.splitlines()][1:]


def time_trainer(home: Path, data: Path) -> tuple[list[float], float]:
    """Seconds from each update of the trainer to the next, with all that happens there, and between two epochs."""
    settings = {
        "model": {"source": str(home / "model")},
        "dataset": {"source": str(data)},
        "adapter": {"rank": RANK, "alpha": ALPHA},
        "training": {
            "epochs": 2,
            "gradient_accumulation": 1,
            "learning_rate": LEARNING_RATE,
            "warmup_steps": 0,
            "gradient_checkpointing": "off",
        },
        "hardware": {"device": "cpu"},
    }
    pairs = list(pairwise(Step(**event) for event in train(home, settings).of_type("step")))
    (idle,) = (after.time - after.seconds - before.time for before, after in pairs if after.epoch != before.epoch)
    return [after.time - before.time for before, after in pairs], idle


def main() -> None:
    """Measure all, or only the barest loop."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bare", nargs=2, type=Path, metavar=("MODEL", "DATA"), help="only the barest loop")
    options = parser.parse_args()
    if options.bare:
        run_bare(*options.bare)
    else:
        compare()


def compare() -> None:
    """Measure both in turn for each length, and write the table."""
    rows = []
    firsts: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        write_model(home / "model", SHAPE)
        for seconds, (turns, steps) in LENGTHS.items():
            data = home / f"data-{seconds}"
            make_samples(data, seconds, steps)
            bare: list[float] = []
            trainer: list[float] = []
            ratios: list[float] = []
            idles: list[float] = []
            for turn in range(turns):
                if turn % 2:  # each goes first in its turn
                    (of_trainer, idle), of_bare = time_trainer(home, data), time_bare(home, data)
                else:
                    of_bare, (of_trainer, idle) = time_bare(home, data), time_trainer(home, data)
                bare += of_bare
                trainer += of_trainer
                ratios.append(statistics.median(of_bare) / statistics.median(of_trainer))
                idles.append(idle / statistics.median(of_trainer))
                print(f"{seconds} s, turn {turn + 1}: {ratios[-1]:.3f}, idle {idles[-1]:.2%} of a step", flush=True)
            medians = [statistics.median(times) for times in (bare, trainer)]
            firsts = firsts or medians
            rows.append(
                [
                    f"{seconds} s",
                    *(f"{median:.2f} s" for median in medians),
                    f"{statistics.median(ratios):.2f} ({turns}: {min(ratios):.2f} to {max(ratios):.2f})",
                    *(f"{median / first:.1f}" for median, first in zip(medians, firsts, strict=True)),
                    f"{statistics.median(idles):.2%}",
                ]
            )
    head = [
        "clip",
        "barest loop, a step",
        "Descant, a step",
        "times as fast (turns)",
        "barest, grown",
        "Descant, grown",
        "idle between epochs, of a step",
    ]
    table.write("step time", head, rows)


if __name__ == "__main__":
    main()
