"""What an adapter is trained to predict: flow matching, as ACE-Step 1.5 itself is trained.

With latents x, noise e and time t the model sees x_t = t e + (1 - t) x and predicts the velocity e - x.
"""

import torch
from torch import Generator, Tensor
from torch.nn.functional import mse_loss

from trainer_core.model import LoadedModel, Variant

# The eight times at which a turbo model is sampled (shift 3): it is distilled and knows no others.
TURBO_TIMESTEPS = (1.0, 0.9545454545454546, 0.9, 0.8333333333333334, 0.75, 0.6428571428571429, 0.5, 0.3)
CONDITION_DROPOUT: dict[Variant, float] = {"base": 0.15, "sft": 0.15, "turbo": 0.0}


def draw_timesteps(model: LoadedModel, count: int, generator: Generator) -> Tensor:
    """`count` times in (0, 1], fp32 on the CPU, drawn as the model's variant was trained.

    base and sft: the larger of two draws of sigmoid(N(mu, sigma)); turbo: one of TURBO_TIMESTEPS.
    """
    if model.variant == "turbo":
        return torch.tensor(TURBO_TIMESTEPS)[torch.randint(len(TURBO_TIMESTEPS), (count,), generator=generator)]
    normal = torch.randn(2, count, generator=generator)
    return torch.sigmoid(model.timestep_mu + model.timestep_sigma * normal).amax(dim=0)


def draw_dropped(model: LoadedModel, count: int, generator: Generator) -> Tensor:
    """Which of `count` samples are trained without their condition: booleans on the CPU."""
    dropped = torch.rand(count, generator=generator) < CONDITION_DROPOUT[model.variant]
    return dropped if model.null_condition is not None else torch.zeros_like(dropped)


def noisy(latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """x_t for latents and noise [B, T, C] at times [B]."""
    t = timesteps.view(-1, 1, 1)
    return t * noise + (1 - t) * latents


def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
    """The mean squared error of each sample's predicted velocity, [B] in fp32; inputs are [B, T, C]."""
    return mse_loss(prediction.float(), noise - latents, reduction="none").mean(dim=(1, 2))
