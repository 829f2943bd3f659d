"""The training loop on real tiny models: what an update is made of, what is refused, what is reported."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Generator, Tensor

from tests.conftest import FIXTURE, make_run
from trainer_core import adapter, dataset, model, objective, optim, precision
from trainer_core import train as training_loop
from trainer_core.events import Epoch, Event, Finished, Skipped, Started, Step
from trainer_core.optim import FINAL_FACTOR
from trainer_core.run_dir import RunDir
from trainer_core.train import draw_batches, train

Collected = tuple[RunDir, list[Event], Finished]


def run_training(home: Path, after_event: Callable[[RunDir, Event], None] | None = None, **sections: Any) -> Collected:
    """Train in this process; the run, its events and how it finished."""
    run = make_run(home, **sections)
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if after_event:
            after_event(run, event)

    return run, events, train(run, run.load_config(), emit)


def steps(events: list[Event]) -> list[Step]:
    return [event for event in events if isinstance(event, Step)]


def weights(run: RunDir, name: str) -> dict[str, Tensor]:
    return load_file(run.checkpoints / name / "adapter_model.safetensors")


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The gradients of each update, taken as the optimizer is about to use them; SGD with rate 1 in its place."""
    seen: list[dict[str, Tensor]] = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            seen.append({str(i): p.grad.clone() for i, p in enumerate(group["params"])})

    monkeypatch.setattr(optim, "make_optimizer", lambda parameters, config: Recording(parameters, lr=1.0))
    monkeypatch.setattr(training_loop, "clip_grads_with_norm_", lambda *arguments: None)
    return seen


def sample_gradients(run: RunDir, epochs: int) -> list[list[dict[str, Tensor]]]:
    """Each sample's own full gradient, in the order and with the draws of a run, computed one sample at a time."""
    config = run.load_config()
    base = model.load(config.model.source)
    torch.manual_seed(config.training.seed)
    adapter.inject(base.transformer, config.adapter)
    base.transformer.train()
    samples = dataset.load(config.dataset.source)
    generator = Generator().manual_seed(config.training.seed)
    found = []
    for _ in range(epochs):
        of_epoch = []
        for index in torch.randperm(len(samples), generator=generator).tolist():
            (batch,) = draw_batches([samples[index]], base, generator)
            prediction = base.transformer(
                hidden_states=objective.noisy(batch["latents"], batch["noise"], batch["timesteps"]),
                timestep=batch["timesteps"],
                timestep_r=batch["timesteps"],
                encoder_hidden_states=batch["condition"],
                context_latents=batch["context"],
                return_dict=False,
            )[0]
            loss = objective.sample_losses(prediction, batch["latents"], batch["noise"]).sum()
            trained = [parameter for _, parameter in adapter.trainable(base.transformer)]
            gradients = torch.autograd.grad(loss, trained)
            of_epoch.append({str(i): gradient for i, gradient in enumerate(gradients)})
        found.append(of_epoch)
    return found


def mean(gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {key: torch.stack([one[key] for one in gradients]).mean(dim=0) for key in gradients[0]}


@pytest.mark.parametrize(("batch_size", "accumulation"), [(1, 4), (2, 2), (4, 1), (2, 1), (1, 1), (4, 8)])
def test_every_update_is_the_plain_mean_over_its_own_samples(
    batch_size: int, accumulation: int, tmp_path: Path, captured: list[dict[str, Tensor]]
) -> None:
    """B1, B4: five samples of unlike lengths; the last window is shorter and divides by its own size."""
    options = {"batch_size": batch_size, "gradient_accumulation": accumulation, "epochs": 2}
    run, events, finished = run_training(tmp_path, training=options)
    window = batch_size * accumulation
    expected = [
        mean(of_epoch[start : start + window])
        for of_epoch in sample_gradients(run, epochs=2)
        for start in range(0, 5, window)
    ]
    assert len(captured) == len(expected) == len(steps(events)) == finished.step == 2 * math.ceil(5 / window)
    for update, wanted in zip(captured, expected, strict=True):
        for key in wanted:
            assert torch.allclose(update[key], wanted[key], rtol=1e-4, atol=1e-7)


def test_a_run_of_a_single_step_trains_and_saves(tmp_path: Path) -> None:
    """B4: fewer samples than a batch, one epoch."""
    options = {"epochs": 1, "batch_size": 8, "gradient_accumulation": 8, "warmup_steps": 0}
    run, events, finished = run_training(tmp_path, training=options)
    assert (finished.reason, finished.step) == ("completed", 1)
    assert steps(events)[0].learning_rate == pytest.approx(3e-4)
    assert any(tensor.abs().max() > 0 for name, tensor in weights(run, "step-000001").items() if "lora_B" in name)


def test_a_run_whose_folder_is_gone_ends_and_makes_nothing_again(tmp_path: Path) -> None:
    def delete(run: RunDir, event: Event) -> None:
        if isinstance(event, Step) and event.step == 2:
            run.delete()

    run, _, finished = run_training(tmp_path, after_event=delete)
    assert (finished.reason, finished.step) == ("aborted", 2)
    assert "folder was moved or deleted" in finished.message
    assert not run.path.exists()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_a_constant_loss_reads_the_same_whatever_the_accumulation(
    accumulation: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """B2."""
    monkeypatch.setattr(
        objective, "sample_losses", lambda prediction, latents, noise: (prediction * 0).sum(dim=(1, 2)) + 2.0
    )
    _, events, _ = run_training(tmp_path, training={"gradient_accumulation": accumulation})
    assert {step.loss for step in steps(events)} == {2.0}
    assert {event.loss for event in events if isinstance(event, Epoch)} == {2.0}


def test_the_schedule_counts_updates_and_the_announced_total_is_the_real_one(tmp_path: Path) -> None:
    """B3: 5 samples, accumulation 2: 3 updates an epoch, 12 in all."""
    options = {"epochs": 4, "gradient_accumulation": 2, "warmup_steps": 3, "learning_rate": 0.01}
    _, events, finished = run_training(tmp_path, training=options)
    (started,) = [event for event in events if isinstance(event, Started)]
    rates = [step.learning_rate for step in steps(events)]
    assert [step.step for step in steps(events)] == list(range(1, 13))
    assert [step.epoch for step in steps(events)] == [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3
    assert started.total_steps == finished.step == 12
    assert rates[2] == max(rates) == 0.01
    assert rates[-1] == min(rates[2:]) == pytest.approx(0.01 * FINAL_FACTOR)
    assert finished.reason == "completed"
    assert finished.message == "Trained 12 steps in 4 epochs on 5 samples."


def test_a_warm_up_longer_than_the_run_is_shortened_and_said(tmp_path: Path) -> None:
    _, events, _ = run_training(tmp_path, training={"warmup_steps": 100})
    (warning,) = [event for event in events if event.type == "warning"]
    assert "100 steps is not shorter than the run of 6" in warning.model_dump()["message"]
    assert steps(events)[0].learning_rate == max(step.learning_rate for step in steps(events))


def test_a_seed_gives_the_same_losses_and_weights_twice(tmp_path: Path) -> None:
    first, events, _ = run_training(tmp_path / "a", adapter={"dropout": 0.3})
    second, again, _ = run_training(tmp_path / "b", adapter={"dropout": 0.3})
    other, different, _ = run_training(tmp_path / "c", adapter={"dropout": 0.3}, training={"seed": 7})
    losses = [step.loss for step in steps(events)]
    assert losses == [step.loss for step in steps(again)]
    assert losses != [step.loss for step in steps(different)]
    name = f"step-{len(losses):06d}"
    one, two = weights(first, name), weights(second, name)
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert not all(torch.equal(one[key], value) for key, value in weights(other, name).items())


def test_only_the_adapter_learns_and_all_of_it_does(tmp_path: Path) -> None:
    run, events, _ = run_training(tmp_path)
    (started,) = [event for event in events if isinstance(event, Started)]
    saved = weights(run, "step-000006")
    assert started.adapted_modules == 32  # 4 layers, self and cross, q k v o
    assert len(saved) == 64
    assert sum(tensor.numel() for tensor in saved.values()) == started.trainable_parameters
    assert all(tensor.abs().max() > 0 for name, tensor in saved.items() if "lora_B" in name)
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}


def spoil_gradients(monkeypatch: pytest.MonkeyPatch, is_bad: Callable[[int], bool]) -> None:
    """Make the loss of chosen windows infinite, as an overflow in the model would; windows count from 1."""
    calls = 0
    honest = objective.sample_losses

    def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        losses = honest(prediction, latents, noise)
        return losses * torch.inf if is_bad(calls) else losses

    monkeypatch.setattr(objective, "sample_losses", sample_losses)


def test_one_bad_window_is_skipped_and_training_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A3: weights and schedule are as before the bad window, and the next one trains."""
    spoil_gradients(monkeypatch, lambda window: window == 2)
    options = {"epochs": 1, "gradient_accumulation": 1, "warmup_steps": 0}
    run, events, finished = run_training(tmp_path, training=options)
    (skipped,) = [event for event in events if isinstance(event, Skipped)]
    assert (skipped.step, skipped.nonfinite_tensors, skipped.total_tensors) == (2, 64, 64)
    assert skipped.reason == "non-finite gradients"
    assert all("_proj.lora_" in name for name in skipped.names)
    assert [step.step for step in steps(events)] == [1, 2, 3, 4]
    (epoch,) = [event for event in events if isinstance(event, Epoch)]
    assert (epoch.updates, epoch.skipped) == (4, 1)
    assert epoch.loss == pytest.approx(sum(step.loss or 0 for step in steps(events)) / 4)
    expected = [0.0003 * optim.learning_rate_factor(step, 0, 5) for step in (1, 2, 3, 4)]
    assert [step.learning_rate for step in steps(events)] == pytest.approx(expected)
    assert all(tensor.isfinite().all() for tensor in weights(run, "step-000004").values())
    assert finished.reason == "completed"


def test_an_epoch_of_bad_windows_aborts_and_keeps_earlier_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_gradients(monkeypatch, lambda window: window > 5)
    options = {"epochs": 50, "gradient_accumulation": 1, "save_every_epochs": 1}
    run, events, finished = run_training(tmp_path, training=options)
    assert finished.reason == "aborted"
    assert finished.message.startswith("In epoch 2 every step produced non-finite gradients on cpu with 32-true")
    assert finished.step == 5
    assert [event.updates for event in events if isinstance(event, Epoch)] == [5, 0]
    assert [event.loss for event in events if isinstance(event, Epoch)][1] is None
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000005"]
    assert all(tensor.isfinite().all() for tensor in weights(run, "step-000005").values())


def test_one_bad_window_does_not_end_a_run_of_one_window_an_epoch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3, on a data set so small that the bad window is its whole epoch. Five samples, five losses a window."""
    spoil_gradients(monkeypatch, lambda loss: loss in (6, 20))
    options = {"epochs": 5, "gradient_accumulation": 8, "save_every_epochs": 1}
    run, events, finished = run_training(tmp_path, training=options)
    assert (finished.reason, finished.step) == ("completed", 3)
    assert [event.updates for event in events if isinstance(event, Epoch)] == [1, 0, 1, 0, 1]
    assert [saved.step for saved in run.list_checkpoints()] == [1, 2, 3]


def test_a_streak_of_bad_windows_aborts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training_loop, "MAX_CONSECUTIVE_SKIPS", 3)
    spoil_gradients(monkeypatch, lambda window: window > 1)
    _, events, finished = run_training(tmp_path, training={"gradient_accumulation": 1})
    assert finished.reason == "aborted"
    assert "3 steps in a row" in finished.message
    assert len([event for event in events if isinstance(event, Skipped)]) == 3


def test_an_fp16_overflow_lowers_the_scale_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the scale starts far too high. 16-mixed is offered on cuda only; its arithmetic runs here on the CPU."""
    fabric = precision.make_fabric("cpu", "16-mixed")
    scaler = fabric.strategy.precision.scaler  # type: ignore[attr-defined]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**30})
    monkeypatch.setattr(precision, "choose", lambda hardware: ("cpu", "16-mixed"))
    monkeypatch.setattr(precision, "make_fabric", lambda device, number_format: fabric)
    options = {"epochs": 3, "gradient_accumulation": 1, "warmup_steps": 0}
    run, events, finished = run_training(tmp_path, training=options)
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert 1 <= len(skipped) < training_loop.MAX_CONSECUTIVE_SKIPS
    assert skipped[0].step == 1
    assert finished.reason == "completed"
    assert finished.step == 15 - len(skipped)
    assert scaler.get_scale() == 2.0 ** (30 - len(skipped))
    saved = weights(run, f"step-{finished.step:06d}")
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}
    assert all(tensor.isfinite().all() for tensor in saved.values())


@pytest.mark.parametrize("stop_at", ["loading_model", "training"])
def test_a_stop_before_the_first_step_saves_nothing_and_says_so(stop_at: str, tmp_path: Path) -> None:
    def stop(run: RunDir, event: Event) -> None:
        if event.type == "phase" and event.model_dump()["name"] == stop_at:
            run.stop.touch()

    run, events, finished = run_training(tmp_path, after_event=stop)
    assert finished.reason == "stopped"
    assert finished.message == "Stopped before the first step; there was nothing to save."
    assert not run.checkpoints.exists()
    assert steps(events) == []


def test_a_stop_in_the_middle_of_an_epoch_saves_the_last_step(tmp_path: Path) -> None:
    def stop(run: RunDir, event: Event) -> None:
        if isinstance(event, Step) and event.step == 4:
            run.stop.touch()

    run, events, finished = run_training(tmp_path, after_event=stop)
    assert (finished.reason, finished.step, finished.epoch) == ("stopped", 4, 2)
    assert [checkpoint.name for checkpoint in run.list_checkpoints()] == ["step-000004"]
    assert events[-1].type == "checkpoint"


def test_checkpoints_come_every_so_many_epochs_and_at_the_end_once(tmp_path: Path) -> None:
    run, events, _ = run_training(tmp_path / "a", training={"epochs": 5, "save_every_epochs": 2})
    assert [(saved.step, saved.epoch) for saved in run.list_checkpoints()] == [(6, 2), (12, 4), (15, 5)]
    run, events, _ = run_training(tmp_path / "b", training={"epochs": 4, "save_every_epochs": 2})
    assert [saved.epoch for saved in run.list_checkpoints()] == [2, 4]
    assert [event.model_dump()["tensors"] for event in events if event.type == "checkpoint"] == [64, 64]


def test_a_model_without_null_condition_trains_without_dropping_it_and_says_so(tmp_path: Path) -> None:
    model.load(str(FIXTURE / "checkpoint")).transformer.save_pretrained(tmp_path / "transformer")
    _, events, finished = run_training(tmp_path, model={"source": str(tmp_path / "transformer")})
    assert finished.reason == "completed"
    (warning,) = [event for event in events if event.type == "warning"]
    assert "without condition dropout" in warning.model_dump()["message"]


@pytest.mark.parametrize("number_format", ["bf16-mixed", "32-true"])
def test_the_adapter_stays_fp32_in_every_precision(number_format: str, tmp_path: Path) -> None:
    """A2, on the device that is here."""
    run, events, finished = run_training(tmp_path, hardware={"precision": number_format})
    assert finished.reason == "completed"
    assert {tensor.dtype for tensor in weights(run, "step-000006").values()} == {torch.float32}
    assert all(step.loss and math.isfinite(step.loss) for step in steps(events))
