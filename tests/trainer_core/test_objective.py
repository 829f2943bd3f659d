from dataclasses import replace

import pytest
import torch
from torch import Generator

from trainer_core import model, objective
from trainer_core.model import LoadedModel


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return model.load("demo")


def test_turbo_draws_only_the_times_it_was_distilled_for(base: LoadedModel) -> None:
    drawn = objective.draw_timesteps(replace(base, variant="turbo"), 4000, Generator().manual_seed(0))
    times, counts = torch.unique(drawn, return_counts=True)
    assert torch.equal(times.flip(0), torch.tensor(objective.TURBO_TIMESTEPS))
    assert counts.min() > 400  # uniform: 500 each


@pytest.mark.parametrize("variant", ["base", "sft"])
def test_base_draws_the_larger_of_two_logit_normals(base: LoadedModel, variant: str) -> None:
    shifted = replace(base, variant=variant, timestep_mu=-0.4, timestep_sigma=1.0)  # type: ignore[arg-type]
    drawn = objective.draw_timesteps(shifted, 100_000, Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    # P(max of two <= t) is the square of one's: the median of the maximum is one draw's 0.7071 quantile.
    quantile = torch.distributions.Normal(-0.4, 1.0).icdf(torch.tensor(0.5**0.5))  # type: ignore[no-untyped-call]
    assert drawn.median().item() == pytest.approx(torch.sigmoid(quantile).item(), abs=0.005)
    wide = objective.draw_timesteps(replace(shifted, timestep_mu=3.0, timestep_sigma=0.0), 10, Generator())
    assert torch.allclose(wide, torch.sigmoid(torch.tensor(3.0)))


def test_conditions_are_dropped_as_the_variant_was_trained(base: LoadedModel) -> None:
    def share(loaded: LoadedModel) -> float:
        return objective.draw_dropped(loaded, 20_000, Generator().manual_seed(0)).float().mean().item()

    assert share(base) == pytest.approx(0.15, abs=0.01)
    assert share(replace(base, variant="turbo")) == 0
    assert share(replace(base, null_condition=None)) == 0


def test_the_loss_is_zero_for_the_true_velocity_and_the_mean_square_otherwise() -> None:
    latents, noise = torch.randn(2, 5, 3), torch.randn(2, 5, 3)
    assert torch.equal(objective.sample_losses(noise - latents, latents, noise), torch.zeros(2))
    assert torch.allclose(objective.sample_losses(noise - latents + 2, latents, noise), torch.full((2,), 4.0))


def test_noisy_latents_run_from_the_data_to_the_noise() -> None:
    latents, noise = torch.randn(3, 5, 2), torch.randn(3, 5, 2)
    mixed = objective.noisy(latents, noise, torch.tensor([0.0, 0.25, 1.0]))
    assert torch.equal(mixed[0], latents[0])
    assert torch.allclose(mixed[1], 0.25 * noise[1] + 0.75 * latents[1])
    assert torch.equal(mixed[2], noise[2])
