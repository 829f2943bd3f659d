import pytest
import torch

from trainer_core.config import TrainingConfig
from trainer_core.optim import FINAL_FACTOR, learning_rate_factor, make_optimizer, make_scheduler


def test_the_peak_is_at_the_end_of_warm_up_and_the_minimum_at_the_last_step() -> None:
    factors = [learning_rate_factor(step, 10, 78) for step in range(1, 79)]
    assert factors[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(factors) == factors[9] == 1
    assert min(factors[9:]) == factors[-1] == pytest.approx(FINAL_FACTOR)
    assert factors[9:] == sorted(factors[9:], reverse=True)
    assert learning_rate_factor(44, 10, 78) == pytest.approx((1 + FINAL_FACTOR) / 2)


@pytest.mark.parametrize("total", [1, 2, 5])
def test_without_warm_up_the_first_update_is_at_the_peak(total: int) -> None:
    factors = [learning_rate_factor(step, 0, total) for step in range(1, total + 1)]
    assert factors[0] == 1
    assert factors[-1] == pytest.approx(FINAL_FACTOR if total > 1 else 1)


@pytest.mark.parametrize("total", [1, 2])
def test_a_run_of_one_step_can_be_scheduled(total: int) -> None:
    """The scheduler asks for the rate after the last update too."""
    optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(1))], TrainingConfig(learning_rate=0.5))
    scheduler = make_scheduler(optimizer, 0, total)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for _ in range(total):
        optimizer.step()
        scheduler.step()


def test_the_scheduler_gives_each_update_its_own_rate() -> None:
    optimizer = make_optimizer([torch.nn.Parameter(torch.zeros(1))], TrainingConfig(learning_rate=0.5))
    scheduler = make_scheduler(optimizer, 2, 4)
    used = []
    for _ in range(4):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert used == pytest.approx([0.5 * learning_rate_factor(step, 2, 4) for step in (1, 2, 3, 4)])
