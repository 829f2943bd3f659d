"""The optimizer and its schedule, both counted in optimizer updates."""

import math
from typing import Any

import torch
from torch.nn import Parameter
from torch.optim import Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from trainer_core.config import TrainingConfig
from trainer_core.formats import MAGNITUDE
from trainer_core.precision import HardwareError

FINAL_FACTOR = 0.01
"""Where a falling schedule ends, as a share of the peak."""


def learning_rate_factor(step: int, training: TrainingConfig, warmup_steps: int, total_steps: int) -> float:
    """The share of the peak learning rate that update `step` (from 1) uses; never zero.

    A straight line to the peak at `warmup_steps` (at the first update without warm-up), then as `training.scheduler`
    says, to FINAL_FACTOR at `total_steps`. A function of the step alone, so that a resumed run needs no state, and a
    longer one is planned again by another total. (The schedules of diffusers and torch waste the first update or the
    last on a rate of zero.)
    """
    peak = max(1, warmup_steps)
    if step <= peak:
        return step / peak
    progress = min(1.0, (step - peak) / max(1, total_steps - peak))
    match training.scheduler:
        case "constant":
            return 1.0
        case "linear":
            left = 1 - progress
        case "cosine":
            left = (1 + math.cos(math.pi * progress)) / 2
        case "cosine_with_restarts":
            within = progress * training.scheduler_cycles % 1 if progress < 1 else 1.0
            left = (1 + math.cos(math.pi * within)) / 2
    return FINAL_FACTOR + (1 - FINAL_FACTOR) * left


def make_optimizer(trained: dict[str, Parameter], training: TrainingConfig, device: torch.device) -> Optimizer:
    """The configured optimizer of the adapter's parameters, by name, at the peak learning rate.

    Raises HardwareError for one that does not work on `device`.
    """
    # A DoRA's magnitudes multiply the base model's outputs: pulled towards zero they would shrink the model.
    magnitudes = [parameter for name, parameter in trained.items() if MAGNITUDE in name]
    others = [parameter for name, parameter in trained.items() if MAGNITUDE not in name]
    groups: list[dict[str, Any]] = [{"params": others, "weight_decay": training.weight_decay}]
    if magnitudes:
        groups.append({"params": magnitudes, "weight_decay": 0.0})
    match training.optimizer:
        case "adamw":
            return AdamW(groups, lr=training.learning_rate, fused=True)
        case "adafactor":
            # A floor of 1 under the parameters' size makes the learning rate mean what it means to AdamW: with the
            # usual 0.001 a LoRA's B, which begins at zero, would hardly move.
            return Adafactor(groups, lr=training.learning_rate, eps=(None, 1.0))
        case "prodigy":
            from prodigyopt import Prodigy

            prodigy = Prodigy(groups, lr=training.learning_rate, safeguard_warmup=True, use_bias_correction=True)
            assert isinstance(prodigy, Optimizer)
            return prodigy
        case "adamw8bit":
            if device.type != "cuda":
                raise HardwareError(f"Optimizer adamw8bit works on cuda only, this run is on {device.type}. Use adamw.")
            from bitsandbytes.optim import AdamW8bit

            adamw = AdamW8bit(groups, lr=training.learning_rate)
            assert isinstance(adamw, Optimizer)
            return adamw


def make_scheduler(
    optimizer: Optimizer, training: TrainingConfig, warmup_steps: int, total_steps: int, done: int = 0
) -> LambdaLR:
    """The schedule after `done` updates. Call `step()` once after each optimizer update."""
    for group in optimizer.param_groups:
        group["initial_lr"] = training.learning_rate
    return LambdaLR(
        optimizer, lambda step: learning_rate_factor(step + 1, training, warmup_steps, total_steps), last_epoch=done - 1
    )
