import pytest
import torch

from trainer_core.config import TrainingConfig
from trainer_core.optim import FINAL_FACTOR, learning_rate_factor, make_optimizer, make_scheduler
from trainer_core.precision import HardwareError

CPU = torch.device("cpu")
SCHEDULERS = ["cosine", "cosine_with_restarts", "linear", "constant"]


def factors(warmup: int, total: int, **training: object) -> list[float]:
    config = TrainingConfig.model_validate(training)
    return [learning_rate_factor(step, config, warmup, total) for step in range(1, total + 1)]


def parameter(size: int = 1) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.zeros(size))


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_warm_up_is_a_line_to_the_peak_and_no_update_is_wasted_on_a_rate_of_zero(scheduler: str) -> None:
    """B3."""
    rates = factors(10, 78, scheduler=scheduler)
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert max(rates) == rates[9] == 1
    assert min(rates) > 0
    assert rates[-1] == pytest.approx(1 if scheduler == "constant" else FINAL_FACTOR)


def test_each_schedule_has_its_shape() -> None:
    cosine, linear, constant = (factors(10, 78, scheduler=name)[9:] for name in ("cosine", "linear", "constant"))
    assert cosine == sorted(cosine, reverse=True)
    assert cosine[34] == linear[34] == pytest.approx((1 + FINAL_FACTOR) / 2)
    assert linear[17] == pytest.approx(FINAL_FACTOR + (1 - FINAL_FACTOR) * 0.75)
    assert cosine[17] > linear[17]
    assert set(constant) == {1.0}


def test_restarts_begin_at_the_peak_and_end_low() -> None:
    rates = factors(0, 31, scheduler="cosine_with_restarts", scheduler_cycles=3)
    assert [step for step, rate in enumerate(rates, start=1) if rate == 1] == [1, 11, 21]
    assert rates[9] < 0.05
    assert rates[5] == pytest.approx((1 + FINAL_FACTOR) / 2)
    assert rates[-1] == pytest.approx(FINAL_FACTOR)
    assert factors(4, 31, scheduler="cosine_with_restarts", scheduler_cycles=1) == factors(4, 31)


@pytest.mark.parametrize("total", [1, 2, 5])
def test_without_warm_up_the_first_update_is_at_the_peak(total: int) -> None:
    rates = factors(0, total)
    assert rates[0] == 1
    assert rates[-1] == pytest.approx(FINAL_FACTOR if total > 1 else 1)


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize("total", [1, 2])
def test_a_run_of_one_step_can_be_scheduled(total: int, scheduler: str) -> None:
    """The scheduler asks for the rate after the last update too."""
    config = TrainingConfig(learning_rate=0.5, scheduler=scheduler)
    optimizer = make_optimizer({"weight": parameter()}, config, CPU)
    schedule = make_scheduler(optimizer, config, 0, total)
    assert optimizer.param_groups[0]["lr"] == 0.5
    for _ in range(total):
        optimizer.step()
        schedule.step()


@pytest.mark.parametrize("done", [0, 1, 3])
def test_the_scheduler_gives_each_update_its_own_rate_wherever_it_begins(done: int) -> None:
    config = TrainingConfig(learning_rate=0.5)
    optimizer = make_optimizer({"weight": parameter()}, config, CPU)
    schedule = make_scheduler(optimizer, config, 2, 4, done)
    used = []
    for _ in range(4 - done):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    assert used == [0.5 * learning_rate_factor(step, config, 2, 4) for step in range(done + 1, 5)]


@pytest.mark.parametrize(("optimizer", "rate"), [("adamw", 0.01), ("adafactor", 0.01), ("prodigy", 1.0)])
def test_each_optimizer_learns_and_keeps_its_state_in_fp32(optimizer: str, rate: float) -> None:
    goal = torch.linspace(-1, 1, 12).view(3, 4)
    weight = torch.nn.Parameter(torch.full((3, 4), 0.1))
    config = TrainingConfig(optimizer=optimizer, learning_rate=rate, weight_decay=0)
    made = make_optimizer({"weight": weight}, config, CPU)
    for _ in range(300):
        made.zero_grad()
        (weight - goal).square().sum().backward()  # type: ignore[no-untyped-call]
        made.step()
    assert (weight - goal).abs().max() < 0.1
    state = [value for value in made.state[weight].values() if isinstance(value, torch.Tensor)]
    assert {value.dtype for value in state} == {torch.float32}


def test_a_learning_rate_means_to_adafactor_what_it_means_to_adamw() -> None:
    """A LoRA's B begins at zero: relative to its size it would not move."""
    moved = {}
    for name in ("adamw", "adafactor"):
        weight = parameter(16)
        made = make_optimizer({"weight": weight}, TrainingConfig(optimizer=name, learning_rate=0.01), CPU)
        weight.grad = torch.ones_like(weight)
        made.step()
        moved[name] = weight.abs().mean().item()
    assert moved["adafactor"] == pytest.approx(moved["adamw"], rel=0.01)


def test_8_bit_adamw_is_refused_off_cuda() -> None:
    config = TrainingConfig(optimizer="adamw8bit")
    with pytest.raises(HardwareError, match="adamw8bit works on cuda only, this run is on cpu"):
        make_optimizer({"weight": parameter()}, config, CPU)


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "prodigy"])
def test_decay_does_not_pull_a_doras_magnitudes_towards_zero(optimizer: str) -> None:
    """They multiply the base model's outputs: it is the model that would shrink."""
    config = TrainingConfig(optimizer=optimizer, learning_rate=1, weight_decay=0.5)
    trained = {"layer.lora_B": torch.nn.Parameter(torch.ones(3, 4)), "layer.lora_magnitude_vector": parameter(3)}
    with torch.no_grad():
        trained["layer.lora_magnitude_vector"].fill_(2)
    made = make_optimizer(trained, config, CPU)
    for weight in trained.values():
        weight.grad = torch.full_like(weight, 1e-30)
    decays = {
        name: group["weight_decay"]
        for group in made.param_groups
        for name, p in trained.items()
        if p is group["params"][0]
    }
    assert decays == {"layer.lora_B": 0.5, "layer.lora_magnitude_vector": 0.0}
    if optimizer == "adamw":
        made.step()
        moved = {name: weight.detach().flatten()[0].item() for name, weight in trained.items()}
        assert moved == pytest.approx({"layer.lora_B": 0.5, "layer.lora_magnitude_vector": 2}, abs=1e-3)
