from dataclasses import replace
from itertools import product

import pytest
import torch
from torch import Generator

from trainer_core import model, objective
from trainer_core.config import TrainingConfig
from trainer_core.model import LoadedModel
from trainer_core.objective import Objective, make_objective, seed_of


@pytest.fixture(scope="module")
def base() -> LoadedModel:
    return model.load("demo")


def goal(base: LoadedModel, variant: str, **training: object) -> Objective:
    return make_objective(replace(base, variant=variant), TrainingConfig.model_validate(training))  # type: ignore[arg-type]


@pytest.mark.parametrize(("variant", "sampling"), [("turbo", "auto"), ("base", "turbo_steps")])
def test_turbo_draws_only_the_times_it_was_distilled_for(base: LoadedModel, variant: str, sampling: str) -> None:
    chosen = goal(base, variant, timestep_sampling=sampling)
    times, counts = torch.unique(chosen.draw_timesteps(4000, Generator().manual_seed(0)), return_counts=True)
    assert torch.equal(times.flip(0), torch.tensor(objective.TURBO_TIMESTEPS))
    assert counts.min() > 400  # uniform: 500 each


@pytest.mark.parametrize(("variant", "sampling"), [("base", "auto"), ("sft", "auto"), ("turbo", "logit_normal")])
def test_base_draws_the_larger_of_two_logit_normals(base: LoadedModel, variant: str, sampling: str) -> None:
    shifted = replace(base, timestep_mu=-0.4, timestep_sigma=1.0)
    drawn = goal(shifted, variant, timestep_sampling=sampling).draw_timesteps(100_000, Generator().manual_seed(0))
    assert drawn.dtype == torch.float32
    # P(max of two <= t) is the square of one's: the median of the maximum is one draw's 0.7071 quantile.
    quantile = torch.distributions.Normal(-0.4, 1.0).icdf(torch.tensor(0.5**0.5))  # type: ignore[no-untyped-call]
    assert drawn.median().item() == pytest.approx(torch.sigmoid(quantile).item(), abs=0.005)
    other = replace(base, timestep_mu=3.0, timestep_sigma=0.0)
    wide = goal(other, variant, timestep_sampling=sampling).draw_timesteps(10, Generator())
    assert torch.allclose(wide, torch.sigmoid(torch.tensor(3.0)))


def test_conditions_are_dropped_as_the_variant_was_trained_or_as_asked(base: LoadedModel) -> None:
    def share(chosen: Objective) -> float:
        return chosen.draw_dropped(20_000, Generator().manual_seed(0)).float().mean().item()

    assert share(goal(base, "base")) == pytest.approx(0.15, abs=0.01)
    assert share(goal(base, "turbo")) == 0
    assert share(goal(base, "turbo", condition_dropout=0.4)) == pytest.approx(0.4, abs=0.01)
    assert share(goal(base, "base", condition_dropout=0)) == 0
    assert share(goal(replace(base, null_condition=None), "base", condition_dropout=0.4)) == 0


def test_each_place_of_a_run_has_its_own_seed_and_always_the_same() -> None:
    places = list(product((1, 2), ("noise", "dropout"), range(50), range(50)))
    seeds = {seed_of(*place) for place in places}
    assert len(seeds) == len(places)
    assert seed_of(42, "noise", 1, 0) == 15917271129191592  # checkpoints on disk rely on it
    assert all(0 <= seed < 2**63 for seed in seeds)


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
