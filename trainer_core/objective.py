"""What an adapter is trained to predict: flow matching, as ACE-Step 1.5 itself is trained.

With latents x, noise e and time t the model sees x_t = t e + (1 - t) x and predicts the velocity e - x.
"""

from dataclasses import dataclass
from hashlib import blake2b

import torch
from torch import Generator, Tensor
from torch.nn.functional import mse_loss

from trainer_core.config import TrainingConfig
from trainer_core.model import LoadedModel, Variant

# The eight times at which a turbo model is sampled (shift 3): it is distilled and knows no others.
TURBO_TIMESTEPS = (1.0, 0.9545454545454546, 0.9, 0.8333333333333334, 0.75, 0.6428571428571429, 0.5, 0.3)
CONDITION_DROPOUT: dict[Variant, float] = {"base": 0.15, "sft": 0.15, "turbo": 0.0}


@dataclass(frozen=True)
class Objective:
    """How timesteps are drawn and how often conditions are dropped."""

    turbo_steps: bool
    """Draw one of TURBO_TIMESTEPS; else the larger of two draws of sigmoid(N(mu, sigma))."""
    mu: float
    sigma: float
    condition_dropout: float
    null_condition: Tensor | None
    """What takes the place of a dropped condition, [1, 1, D]."""

    def draw_timesteps(self, count: int, generator: Generator) -> Tensor:
        """`count` times in (0, 1], fp32 on the CPU."""
        if self.turbo_steps:
            return torch.tensor(TURBO_TIMESTEPS)[torch.randint(len(TURBO_TIMESTEPS), (count,), generator=generator)]
        normal = torch.randn(2, count, generator=generator)
        return torch.sigmoid(self.mu + self.sigma * normal).amax(dim=0)

    def draw_dropped(self, count: int, generator: Generator) -> Tensor:
        """Which of `count` samples are trained without their condition: booleans on the CPU."""
        return torch.rand(count, generator=generator) < self.condition_dropout


def wanted_dropout(variant: Variant, training: TrainingConfig) -> float:
    """The share of conditions to drop: as `training` asks, or as the variant was trained."""
    return CONDITION_DROPOUT[variant] if training.condition_dropout == "auto" else training.condition_dropout


def make_objective(model: LoadedModel, training: TrainingConfig) -> Objective:
    """The objective the model's variant was trained with, with what `training` overrides.

    Without a null condition in the model nothing is dropped, whatever is asked for.
    """
    sampling = training.timestep_sampling
    return Objective(
        turbo_steps=model.variant == "turbo" if sampling == "auto" else sampling == "turbo_steps",
        mu=model.timestep_mu,
        sigma=model.timestep_sigma,
        condition_dropout=0.0 if model.null_condition is None else wanted_dropout(model.variant, training),
        null_condition=model.null_condition,
    )


def seed_of(seed: int, *place: str | int) -> int:
    """The seed of what is drawn at one place of a run with `seed`, such as the noise of one window.

    So a run can be taken up at any window without any generator's state.
    """
    return int.from_bytes(blake2b(repr((seed, *place)).encode(), digest_size=7).digest(), "big")


def noisy(latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """x_t for latents and noise [B, T, C] at times [B]."""
    t = timesteps.view(-1, 1, 1)
    return t * noise + (1 - t) * latents


def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """The mean squared error of each sample's predicted velocity, [B] in fp32; inputs are [B, T, C]."""
    return mse_loss(prediction.float(), noise - latents, reduction="none").mean(dim=(1, 2))
