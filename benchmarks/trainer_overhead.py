"""What the trainer costs beside the barest loop that does the same arithmetic.

Both train the same LoRA on the same made-up model and samples, in turn in one process, so that what else the machine
does falls on both alike. The trainer runs as it is, with its guard, its look at the stop file and its events written
to disk; gradient checkpointing is off. Run it with `.venv/bin/python -m benchmarks.trainer_overhead`.
"""

import argparse
import os
import statistics
import tempfile
import time
from itertools import pairwise
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as the trainer does

import torch
from diffusers import AceStepTransformer1DModel
from peft import LoraConfig, inject_adapter_in_model
from torch.nn.utils import clip_grad_norm_

from trainer_core.config import RunConfig
from trainer_core.events import Event, EventWriter, Step
from trainer_core.run_folders import RunFolders
from trainer_core.train import train

WIDTH, LAYERS, TOKENS = 512, 8, 64
LEARNING_RATE, RANK, ALPHA = 1e-4, 16, 32


def make_model(folder: Path) -> None:
    """A model of random weights in the original's proportions, as a diffusers transformer folder."""
    torch.manual_seed(0)
    AceStepTransformer1DModel(
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=64,
    ).save_pretrained(folder)


def make_samples(folder: Path, seconds: int, count: int) -> list[dict[str, torch.Tensor]]:
    """Made-up samples of one length, also written as tensor files."""
    folder.mkdir()
    frames = seconds * 25
    samples = []
    for number in range(count):
        tensors = {
            "target_latents": torch.randn(frames, 64),
            "context_latents": torch.randn(frames, 128),
            "encoder_hidden_states": torch.randn(TOKENS, WIDTH),
            "encoder_attention_mask": torch.ones(TOKENS),
        }
        torch.save(tensors, folder / f"{number}.pt")
        samples.append(tensors)
    return samples


def time_bare(model: Path, samples: list[dict[str, torch.Tensor]]) -> list[float]:
    """Seconds of each update of the barest loop: one pass over the samples, one sample an update."""
    transformer = AceStepTransformer1DModel.from_pretrained(model).train()
    transformer.requires_grad_(False)
    adapted = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=["to_q", "to_k", "to_v", "to_out.0"])
    inject_adapter_in_model(adapted, transformer)
    parameters = [parameter for parameter in transformer.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, fused=True)
    seconds = []
    for sample in samples:
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
        seconds.append(time.perf_counter() - began)
    return seconds


def time_trainer(home: Path, model: Path, data: Path) -> list[float]:
    """Seconds from each update to the next of the trainer: all that happens between them counts."""
    settings = {
        "model": {"source": str(model)},
        "dataset": {"source": str(data)},
        "adapter": {"rank": RANK, "alpha": ALPHA},
        "training": {"epochs": 1, "gradient_accumulation": 1, "learning_rate": LEARNING_RATE, "warmup_steps": 0},
        "hardware": {"device": "cpu"},
    }
    run = RunFolders(home).create(RunConfig.model_validate(settings))
    ends: list[float] = []
    with EventWriter(run.events) as writer:

        def emit(event: Event) -> None:
            writer.write(event)
            if isinstance(event, Step) or (event.type == "phase" and event.model_dump()["name"] == "training"):
                ends.append(time.perf_counter())

        train(run, run.load_config(), emit)
    return [after - before for before, after in pairwise(ends)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="turns of each (%(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="updates a turn, the first not counted (%(default)s)")
    parser.add_argument("--seconds", type=int, default=60, help="length of a clip (%(default)s)")
    options = parser.parse_args()
    bare: list[float] = []
    trainer: list[float] = []
    ratios: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        make_model(home / "model")
        samples = make_samples(home / "data", options.seconds, options.steps)
        for turn in range(options.rounds):
            if turn % 2:  # each goes first half of the time
                of_trainer = time_trainer(home, home / "model", home / "data")[1:]
                of_bare = time_bare(home / "model", samples)[1:]
            else:
                of_bare = time_bare(home / "model", samples)[1:]
                of_trainer = time_trainer(home, home / "model", home / "data")[1:]
            bare += of_bare
            trainer += of_trainer
            ratios.append(statistics.median(of_trainer) / statistics.median(of_bare))
            print(f"turn {turn + 1}: {ratios[-1]:.3f}", flush=True)
    print(
        f"{len(bare)} steps each on clips of {options.seconds} s. Median step: barest loop "
        f"{statistics.median(bare):.3f} s, trainer {statistics.median(trainer):.3f} s. "
        f"Ratio of the medians {statistics.median(trainer) / statistics.median(bare):.3f}, "
        f"median of the turns' ratios {statistics.median(ratios):.3f}."
    )


if __name__ == "__main__":
    main()
