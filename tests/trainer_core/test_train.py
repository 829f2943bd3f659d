"""The training loop on real tiny models: what an update is made of, what is refused, what is reported."""

import json
import math
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.models.transformers import ace_step_transformer
from safetensors.torch import load_file, save_file
from torch import Generator, Tensor

from tests.conftest import FIXTURE, make_run
from tests.trainer_core.host_waits import HostWaits
from tests.trainer_core.training import of_kind, run_training, spoil_gradients, steps, stop_at, weights, write_samples
from trainer_core import (
    adapter,
    attention,
    checkpoint,
    dataset,
    free_memory,
    model,
    objective,
    optim,
    origin,
    precision,
)
from trainer_core import train as training_loop
from trainer_core.batching import draw_batches, epoch_order
from trainer_core.config import TrainingConfig
from trainer_core.events import Checkpoint, Epoch, Event, Skipped, Started, Step, Validation, Warning
from trainer_core.merged_lora import MergedLora
from trainer_core.optim import FINAL_FACTOR
from trainer_core.run_dir import RunDir
from trainer_core.sources import SourceError
from trainer_core.train import train


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Tensor]]:
    """The gradients of each update, taken as the optimizer is about to use them; SGD with rate 1 in its place."""
    seen: list[dict[str, Tensor]] = []

    class Recording(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            (group,) = self.param_groups
            seen.append({str(i): p.grad.clone() for i, p in enumerate(group["params"])})

    monkeypatch.setattr(optim, "make_optimizer", lambda trained, *rest: Recording(trained.values(), lr=1.0))
    monkeypatch.setattr(training_loop, "clip_grads_with_norm_", lambda *arguments: None)
    return seen


def sample_gradients(run: RunDir, epochs: int, window: int) -> list[list[dict[str, Tensor]]]:
    """Each sample's own full gradient, in the order and with the draws of a run, computed one sample at a time."""
    config = run.load_config()
    base = model.load(config.model.source)
    goal = objective.make_objective(base, config.training)
    seed = config.training.seed
    torch.manual_seed(seed)
    adapter.inject(base.transformer, config.adapter)
    base.transformer.train()
    samples = dataset.load(config.dataset.source)
    found = []
    for epoch in range(1, epochs + 1):
        of_epoch = []
        for place, index in enumerate(epoch_order(samples, config.training.batch_size, seed, epoch)):
            if place % window == 0:
                generator = Generator().manual_seed(objective.seed_of(seed, "noise", epoch, place))
            (batch,) = draw_batches([samples[index]], goal, generator)
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


@pytest.mark.parametrize(
    ("count", "batch_size", "accumulation"),
    [(5, 1, 4), (4, 1, 4), (8, 1, 4), (5, 2, 2), (5, 4, 1), (5, 2, 1), (5, 1, 1), (2, 4, 8)],
)
def test_every_update_is_the_plain_mean_over_its_own_samples(
    count: int, batch_size: int, accumulation: int, tmp_path: Path, captured: list[dict[str, Tensor]]
) -> None:
    """B1, B4: samples of unlike lengths; the last window may be shorter and divides by its own size."""
    source = write_samples(tmp_path / "tensors", [(20 + 7 * number, 3 + number) for number in range(count)])
    options = {"batch_size": batch_size, "gradient_accumulation": accumulation, "epochs": 2}
    run, events, finished = run_training(tmp_path, dataset={"source": source}, training=options)
    window = batch_size * accumulation
    expected = [
        mean(of_epoch[start : start + window])
        for of_epoch in sample_gradients(run, epochs=2, window=window)
        for start in range(0, count, window)
    ]
    assert len(captured) == len(expected) == len(steps(events)) == finished.step == 2 * math.ceil(count / window)
    for update, wanted in zip(captured, expected, strict=True):
        for key in wanted:
            assert torch.allclose(update[key], wanted[key], rtol=1e-4, atol=1e-7)


def test_what_a_sample_contributes_does_not_depend_on_what_it_is_batched_with(
    tmp_path: Path, captured: list[dict[str, Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two samples of one shape, which are computed at once, one of 12 frames and one of 600."""
    monkeypatch.setattr(training_loop, "epoch_order", lambda samples, batch_size, *rest: epoch_order(samples, 1, *rest))
    source = write_samples(tmp_path / "tensors", [(40, 9), (40, 9), (12, 3), (600, 80)])
    updates = []
    for batch_size in (1, 2, 4):
        options = {"batch_size": batch_size, "gradient_accumulation": 4 // batch_size, "epochs": 2}
        _, events, _ = run_training(tmp_path, dataset={"source": source}, training=options)
        updates.append([(step.loss, seen) for step, seen in zip(steps(events), captured, strict=True)])
        captured.clear()
    assert [len(each) for each in updates] == [2, 2, 2]
    for other in updates[1:]:
        for (loss, gradients), (other_loss, other_gradients) in zip(updates[0], other, strict=True):
            assert loss == pytest.approx(other_loss, rel=1e-6)
            assert all(torch.allclose(gradients[key], other_gradients[key], rtol=1e-4, atol=1e-7) for key in gradients)


def test_whatever_is_drawn_is_fp32_also_for_samples_in_bf16() -> None:
    samples = dataset.load(str(FIXTURE / "tensors"))
    assert {tensor.dtype for sample in samples for tensor in sample.tensors.values()} == {torch.bfloat16}
    base = model.load(str(FIXTURE / "checkpoint"))
    goal = objective.make_objective(base, TrainingConfig())
    for batch in draw_batches(samples, goal, Generator()):
        assert {tensor.dtype for tensor in batch.values()} == {torch.float32}


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


def test_samples_mapped_from_their_files_teach_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, events, _ = run_training(tmp_path / "held")
    monkeypatch.setattr(free_memory, "DATASET_SHARE", 0.0)
    other, mapped_events, finished = run_training(tmp_path / "mapped")
    assert finished.reason == "completed"
    assert [step.loss for step in steps(mapped_events)] == [step.loss for step in steps(events)]
    names = {origin.read_state(folder).dataset for kept in (run, other) for folder in kept.checkpoints.iterdir()}
    assert len(names) == 1


def test_the_host_waits_for_the_device_once_a_step(tmp_path: Path) -> None:
    """A graphics card idles while the host waits for it; what one step has more than another is counted here."""
    counts: list[int] = []

    def note(run: RunDir, event: Event) -> None:
        if isinstance(event, Step):
            counts.append(waits.count)

    with HostWaits() as waits:
        run_training(tmp_path, note, training={"epochs": 1, "gradient_accumulation": 2, "warmup_steps": 0})
    assert len(counts) == 3
    assert [after - before for before, after in pairwise(counts)] == [1, 1]
    with HostWaits() as waits:
        tensor = torch.ones(3)
        _ = tensor[0].item(), float(tensor[1]), bool(tensor[2]), tensor.tolist(), tensor.numpy(), int(tensor[0])
    assert waits.count == 6


def test_the_schedule_counts_updates_and_the_announced_total_is_the_real_one(tmp_path: Path) -> None:
    """B3: 103 samples, accumulation 4: 26 updates an epoch, 78 in all, the last of each epoch over 3 samples."""
    source = write_samples(tmp_path / "tensors", [(4, 1)] * 103)
    options = {"epochs": 3, "gradient_accumulation": 4, "warmup_steps": 10, "learning_rate": 0.01}
    small = {"targets": ["layers.3.mlp.down_proj"]}  # little to compute
    _, events, finished = run_training(tmp_path, dataset={"source": source}, adapter=small, training=options)
    (started,) = of_kind(events, Started)
    rates = [step.learning_rate for step in steps(events)]
    assert [step.step for step in steps(events)] == list(range(1, 79))
    assert [step.epoch for step in steps(events)] == [1] * 26 + [2] * 26 + [3] * 26
    assert started.total_steps == finished.step == 78
    assert [step for step, rate in enumerate(rates, start=1) if rate == max(rates)] == [10]
    assert rates[9] == 0.01
    assert rates[-1] == min(rates[9:]) == pytest.approx(0.01 * FINAL_FACTOR)
    assert finished.reason == "completed"
    assert finished.message == "Trained 78 steps in 3 epochs on 103 samples."


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
    expected = [0.0003 * optim.learning_rate_factor(step, run.load_config().training, 0, 5) for step in (1, 2, 3, 4)]
    assert [step.learning_rate for step in steps(events)] == pytest.approx(expected)
    assert all(tensor.isfinite().all() for tensor in weights(run, "step-000004").values())
    assert finished.reason == "completed"


@pytest.mark.parametrize(
    ("spoil", "reason", "tensors"),
    [
        (lambda losses: losses + torch.inf, "non-finite loss", 0),  # its gradients are finite
        (lambda losses: losses * 1e24, "gradients too large for fp32", 0),  # finite, but not their norm
        (lambda losses: losses * torch.nan, "non-finite gradients", 64),
    ],
)
def test_whatever_is_not_finite_makes_a_bad_window_and_is_called_what_it_is(
    spoil: Callable[[Tensor], Tensor], reason: str, tensors: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil_gradients(monkeypatch, lambda window: window == 2, spoil)
    _, events, finished = run_training(tmp_path, training={"epochs": 1, "gradient_accumulation": 1})
    (skipped,) = of_kind(events, Skipped)
    assert (skipped.step, skipped.reason, skipped.nonfinite_tensors) == (2, reason, tensors)
    assert (finished.reason, finished.step) == ("completed", 4)


def test_one_infinite_gradient_in_one_tensor_is_enough_and_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the loss is finite."""
    honest = optim.make_optimizer
    calls = 0

    def spoil(gradient: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return gradient.index_fill(0, torch.tensor([0]), torch.inf) if calls == 2 else gradient

    def make_optimizer(trained: dict[str, torch.nn.Parameter], *rest: Any) -> torch.optim.Optimizer:
        trained["layers.1.cross_attn.to_v.lora_B.default.weight"].register_hook(spoil)  # type: ignore[no-untyped-call]
        return honest(trained, *rest)

    monkeypatch.setattr(optim, "make_optimizer", make_optimizer)
    run, events, finished = run_training(tmp_path, training={"epochs": 1, "gradient_accumulation": 1})
    (skipped,) = of_kind(events, Skipped)
    assert (skipped.step, skipped.reason, skipped.nonfinite_tensors, skipped.total_tensors) == (
        2,
        "non-finite gradients",
        1,
        64,
    )
    assert skipped.names == ["layers.1.cross_attn.v_proj.lora_B.weight"]
    assert finished.step == 4
    assert all(tensor.isfinite().all() for tensor in weights(run, "step-000004").values())


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
    spoil_gradients(monkeypatch, lambda window: window > 1)
    options = {"gradient_accumulation": 1, "max_consecutive_skips": 3}
    run, events, finished = run_training(tmp_path, training=options)
    assert finished.reason == "aborted"
    assert finished.message.startswith("3 steps in a row produced non-finite gradients on cpu with 32-true")
    assert len(of_kind(events, Skipped)) == 3
    # What was learned before is kept: it has no part in what went wrong.
    assert [saved.step for saved in run.list_checkpoints()] == [1]
    assert all(tensor.isfinite().all() for tensor in weights(run, "step-000001").values())


@pytest.mark.parametrize("save_every_epochs", [1, 2])
def test_weights_that_are_no_longer_finite_are_not_saved(
    save_every_epochs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An update of finite gradients can still spoil the weights, here the sixth, the first of epoch 2."""
    parameters: list[torch.nn.Parameter] = []
    honest = optim.make_optimizer

    def make_optimizer(trained: dict[str, torch.nn.Parameter], *rest: Any) -> torch.optim.Optimizer:
        parameters.extend(trained.values())
        return honest(trained, *rest)

    def spoil(run: RunDir, event: Event) -> None:
        if isinstance(event, Step) and event.step == 6:
            with torch.no_grad():
                parameters[0].fill_(torch.nan)
            if save_every_epochs == 2:
                run.stop.touch()

    monkeypatch.setattr(optim, "make_optimizer", make_optimizer)
    options = {"epochs": 50, "gradient_accumulation": 1, "save_every_epochs": save_every_epochs}
    if save_every_epochs == 2:
        events: list[Event] = []

        def spoil_and_collect(run: RunDir, event: Event) -> None:
            events.append(event)
            spoil(run, event)

        with pytest.raises(checkpoint.CheckpointError, match="1 of 64 tensors hold NaN or infinite values"):
            run_training(tmp_path, spoil_and_collect, training=options)
        assert not any(isinstance(event, Checkpoint) and event.step > 5 for event in events)
        return
    options["max_consecutive_skips"] = 3  # before the epoch is over
    run, _, finished = run_training(tmp_path, spoil, training=options)
    assert (finished.reason, finished.step) == ("aborted", 6)
    assert "non-finite gradients" in finished.message
    assert [saved.step for saved in run.list_checkpoints()] == [5]


def test_an_fp16_overflow_lowers_the_scale_and_training_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the scale starts far too high. 16-mixed is offered on cuda only; its arithmetic runs here on the CPU."""
    fabric = precision.make_fabric("cpu", "16-mixed")
    scaler = fabric.strategy.precision.scaler  # type: ignore[attr-defined]
    scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0**30})
    monkeypatch.setattr(precision, "choose", lambda *rest: ("cpu", "16-mixed"))
    monkeypatch.setattr(precision, "make_fabric", lambda device, number_format: fabric)
    options = {"epochs": 3, "gradient_accumulation": 1, "warmup_steps": 0}
    run, events, finished = run_training(tmp_path, training=options)
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert 1 <= len(skipped) < 25
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
    run, events, finished = run_training(tmp_path, after_event=stop_at(4))
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
    original = Path(shutil.copytree(FIXTURE / "checkpoint", tmp_path / "original"))
    kept = {n: t for n, t in load_file(original / "model.safetensors").items() if n != "null_condition_emb"}
    save_file(kept, original / "model.safetensors")
    for source in (tmp_path / "transformer", original):
        _, events, finished = run_training(tmp_path, model={"source": str(source)})
        assert finished.reason == "completed"
        (warning,) = of_kind(events, Warning)
        assert "without condition dropout" in warning.message
    turbo = {"source": str(original), "variant": "turbo"}
    assert of_kind(run_training(tmp_path, model=turbo)[1], Warning) == []
    dropping = run_training(tmp_path, model=turbo, training={"condition_dropout": 0.4})[1]
    assert "without condition dropout" in of_kind(dropping, Warning)[0].message


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
@pytest.mark.parametrize(
    "options", [{"precision": "32-true"}, {"precision": "bf16-mixed"}, {"precision": "auto", "base_dtype": "bf16"}]
)
def test_adapter_and_optimizer_are_fp32_in_every_precision(
    options: dict[str, str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A2, on the device that is here: parameters before and after Fabric's setup, gradients, optimizer state."""
    made: list[torch.optim.Optimizer] = []
    honest = optim.make_optimizer
    monkeypatch.setattr(optim, "make_optimizer", lambda *arguments: made.append(honest(*arguments)) or made[0])  # type: ignore[func-returns-value]
    run, events, finished = run_training(
        tmp_path,
        adapter={"type": kind, "decompose_factor": 4},
        model={"base_dtype": options.get("base_dtype", "auto")},
        hardware={"precision": options["precision"]},
    )
    assert finished.reason == "completed"
    parameters = [parameter for group in made[0].param_groups for parameter in group["params"]]
    assert len(parameters) == len(weights(run, "step-000006"))
    assert {parameter.dtype for parameter in parameters} == {torch.float32}
    state = [value for values in made[0].state.values() for value in values.values()]
    assert {value.dtype for value in state if isinstance(value, Tensor)} == {torch.float32}
    assert {tensor.dtype for tensor in weights(run, "step-000006").values()} == {torch.float32}
    assert all(step.loss and math.isfinite(step.loss) for step in steps(events))
    (started,) = of_kind(events, Started)
    assert started.base_dtype == options.get("base_dtype", "fp32")


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_a_base_in_bf16_learns_the_very_same(kind: str, tmp_path: Path) -> None:
    """Only weights that autocast rounds to bf16 anyway are kept so; a DoRA's norms see the rounding."""
    learned = []
    for base_dtype in ("fp32", "bf16"):
        run, events, _ = run_training(
            tmp_path / base_dtype,
            adapter={"type": kind, "decompose_factor": 4},
            model={"base_dtype": base_dtype},
            hardware={"precision": "bf16-mixed"},
        )
        learned.append(([step.loss for step in steps(events)], weights(run, "step-000006")))
    (losses, saved), (losses_bf16, saved_bf16) = learned
    if kind == "dora":
        assert losses == pytest.approx(losses_bf16, rel=1e-4)
        assert all(torch.allclose(tensor, saved_bf16[name], rtol=0.01, atol=1e-3) for name, tensor in saved.items())
    else:
        assert losses == losses_bf16
        assert all(torch.equal(tensor, saved_bf16[name]) for name, tensor in saved.items())


def test_a_validation_that_is_not_finite_is_no_number_and_never_the_best(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest = objective.sample_losses
    measured = 0

    def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
        nonlocal measured
        measured += not torch.is_grad_enabled()
        losses = honest(prediction, latents, noise)
        return losses if torch.is_grad_enabled() or measured > training_loop.VALIDATION_DRAWS else losses * torch.nan

    monkeypatch.setattr(objective, "sample_losses", sample_losses)
    options = {"epochs": 2, "save_every_epochs": 1}
    run, events, _ = run_training(tmp_path, dataset={"validation_fraction": 0.2}, training=options)
    assert [math.isnan(event.loss or 0) for event in of_kind(events, Validation)] == [True, False]
    first, second = run.list_checkpoints()
    assert (first.validation_loss, first.best, second.best) == (None, False, True)
    assert "NaN" not in (run.checkpoints / first.name / "state.json").read_text()


def test_a_bad_window_leaves_weights_optimizer_and_schedule_bit_identical(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A3: the checkpoint after a bad last window of an epoch is the one before it, in every tensor."""
    one_epoch = {"epochs": 1, "gradient_accumulation": 1, "save_every_epochs": 1}
    spoil_gradients(monkeypatch, lambda window: window == 5)
    run, events, _ = run_training(tmp_path / "bad", training=one_epoch)
    assert [(s.step, s.epoch) for s in of_kind(events, Skipped)] == [(5, 1)]
    stopped, _, _ = run_training(tmp_path / "stopped", after_event=stop_at(4), training=one_epoch)
    for file in ("adapter_model.safetensors", "state.safetensors"):
        one, two = (load_file(r.checkpoints / "step-000004" / file) for r in (run, stopped))
        assert set(one) == set(two)
        assert all(torch.equal(tensor, two[name]) for name, tensor in one.items())


def test_the_held_out_samples_are_never_trained_on_and_always_measured_alike(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[list[float]] = [[]]
    trained: set[float] = set()
    honest = objective.sample_losses

    def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            trained.add(latents.sum().item())
            if measured[-1]:
                measured.append([])
        else:
            measured[-1].append(noise.sum().item() + latents.sum().item())
        return honest(prediction, latents, noise)

    monkeypatch.setattr(objective, "sample_losses", sample_losses)
    run, events, _ = run_training(
        tmp_path,
        dataset={"validation_fraction": 0.3},
        adapter={"dropout": 0.5},
        training={"epochs": 3, "learning_rate": 1e-9, "save_every_epochs": 1},
    )
    (started,) = of_kind(events, Started)
    assert (started.samples, started.validation_samples, len(trained)) == (3, 2, 3)
    assert started.total_steps == len(steps(events)) == 3 * 2
    assert len(measured) == 3
    assert len(set(measured[0])) == 2 * training_loop.VALIDATION_DRAWS
    assert measured[0] == measured[1] == measured[2]
    seen = of_kind(events, Validation)
    assert [(event.epoch, event.step) for event in seen] == [(1, 2), (2, 4), (3, 6)]
    assert seen[0].loss == pytest.approx(seen[2].loss, abs=1e-5)  # without dropout, and hardly any learning
    assert [saved.validation_loss for saved in run.list_checkpoints()] == [event.loss for event in seen]


def test_validation_measures_what_is_learned(tmp_path: Path) -> None:
    options = {"epochs": 6, "learning_rate": 0.02, "gradient_accumulation": 1, "warmup_steps": 0}
    _, events, _ = run_training(tmp_path, dataset={"validation_fraction": 0.2}, training=options)
    losses = [event.loss or 0 for event in of_kind(events, Validation)]
    assert len(losses) == 6
    assert losses[-1] < losses[0] - 0.01


def test_a_single_sample_can_not_be_held_out(tmp_path: Path) -> None:
    folder = tmp_path / "one"
    folder.mkdir()
    shutil.copy(FIXTURE / "tensors" / "1a2b3c4d.pt", folder)
    with pytest.raises(SourceError, match="one sample has none to hold out"):
        run_training(tmp_path, dataset={"source": str(folder), "validation_fraction": 0.1})
    _, _, finished = run_training(tmp_path, dataset={"source": str(folder)})
    assert finished.step == 2


def test_data_of_another_variant_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "tensors"
    shutil.copytree(FIXTURE / "tensors", folder)
    (folder / "preprocess_meta.json").write_text('{"model_variant": "acestep-v15-turbo"}')
    with pytest.raises(SourceError, match=r"made with the acestep-v15-turbo model, this model is base"):
        run_training(tmp_path, dataset={"source": str(folder)})
    for right in ("xl_base", "my own", ""):
        (folder / "preprocess_meta.json").write_text(json.dumps({"model_variant": right}))
        _, _, finished = run_training(tmp_path, dataset={"source": str(folder)})
        assert finished.reason == "completed"


def test_prodigy_at_the_rate_of_another_optimizer_is_said(tmp_path: Path) -> None:
    _, events, _ = run_training(tmp_path, training={"optimizer": "prodigy"})
    assert "1 is usual" in of_kind(events, Warning)[0].message
    _, events, _ = run_training(tmp_path, training={"optimizer": "prodigy", "learning_rate": 1})
    assert of_kind(events, Warning) == []


def test_a_save_that_lacks_a_tensor_ends_the_run_without_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E6: loudly, and the page is told of none."""
    honest = adapter.tensors
    monkeypatch.setattr(adapter, "tensors", lambda transformer: dict(list(honest(transformer).items())[1:]))
    run = make_run(tmp_path)
    events: list[Event] = []
    with pytest.raises(checkpoint.CheckpointError, match=r"63 tensors were written .*, 64 were trained"):
        train(run, run.load_config(), events.append)
    assert len(of_kind(events, Step)) == 6
    assert of_kind(events, Checkpoint) == []
    assert run.list_checkpoints() == []


# As the loop computed them with diffusers' dense mask and PEFT's own layers.
@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_what_is_learned_is_what_the_dense_mask_teaches(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows of 8 tokens in samples of 21 to 38; the rate is so high that a difference would grow."""
    options: dict[str, Any] = {
        "adapter": {
            "type": kind,
            "rank": 4,
            "alpha": 8,
            "decompose_factor": 4,
            "targets": ["self_attention", "cross_attention", "mlp"],
        },
        "training": {"learning_rate": 0.01, "epochs": 3, "gradient_accumulation": 2, "warmup_steps": 0, "seed": 7},
    }
    _, events, _ = run_training(tmp_path / "own", **options)

    masks: list[Any] = []
    build = ace_step_transformer._create_4d_mask

    def build_and_note(*arguments: Any, **keywords: Any) -> Any:
        masks.append(build(*arguments, **keywords))
        return masks[-1]

    monkeypatch.setattr(ace_step_transformer, "_create_4d_mask", build_and_note)
    monkeypatch.setattr(attention, "use_training_attention", lambda *arguments: None)
    for name in ("use_lean_blocks", "use_patches", "compute_once"):
        monkeypatch.setattr(training_loop, name, lambda *arguments: None)
    monkeypatch.setattr(model, "use_frozen_layers", lambda *arguments: None)
    monkeypatch.setattr(MergedLora, "take_over", lambda layer: None)
    _, dense_events, _ = run_training(tmp_path / "dense", **options)
    assert masks  # it is diffusers' and PEFT's own way
    losses, expected = ([step.loss for step in steps(each) if step.loss is not None] for each in (events, dense_events))
    assert len(losses) == 9
    assert max(expected) - min(expected) > 0.01
    assert losses == pytest.approx(expected, abs=3e-6)
