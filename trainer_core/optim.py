"""The optimizer and its schedule, both counted in optimizer updates."""

import math
from collections.abc import Iterable

from torch.nn import Parameter
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

from trainer_core.config import TrainingConfig

FINAL_FACTOR = 0.01
"""Where the cosine ends, as a share of the peak."""


def learning_rate_factor(step: int, warmup_steps: int, total_steps: int) -> float:
    """The share of the peak learning rate that update `step` (from 1) uses.

    A straight line to the peak at `warmup_steps` (at the first update without warm-up), then half a cosine to
    FINAL_FACTOR at `total_steps`.
    """
    peak = max(1, warmup_steps)
    if step <= peak:
        return step / peak
    return FINAL_FACTOR + (1 - FINAL_FACTOR) * (1 + math.cos(math.pi * (step - peak) / max(1, total_steps - peak))) / 2


def make_optimizer(parameters: Iterable[Parameter], config: TrainingConfig) -> AdamW:
    """AdamW with the configured peak learning rate."""
    return AdamW(parameters, lr=config.learning_rate, weight_decay=config.weight_decay)


def make_scheduler(optimizer: AdamW, warmup_steps: int, total_steps: int) -> LambdaLR:
    """Warm-up and cosine. Call `step()` once after each optimizer update."""
    return LambdaLR(optimizer, lambda done: learning_rate_factor(done + 1, warmup_steps, total_steps))
