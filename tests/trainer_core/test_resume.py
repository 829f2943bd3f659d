"""Going on from a checkpoint: exactly, or as a warm start that says it is one."""

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import FIXTURE, fixture_settings, make_run
from tests.trainer_core.training import Collected, of_kind, run_training, spoil_gradients, steps, stop_at, weights
from trainer_core import objective, optim, precision
from trainer_core.config_checks import ConfigError, validate
from trainer_core.events import Epoch, Event, Phase, Started, Step, Validation, Warning
from trainer_core.run_dir import RunDir
from trainer_core.sources import SourceError
from trainer_core.train import train

# Three windows an epoch, of 2, 2 and 1 samples; six updates.
TWO_EPOCHS: dict[str, Any] = {
    "training": {"epochs": 2, "warmup_steps": 2, "learning_rate": 0.01},
    "adapter": {"dropout": 0.3},
}


def checkpoint_of(run: RunDir, step: int) -> str:
    return str(run.checkpoints / f"step-{step:06d}")


def settings(**changes: Any) -> dict[str, Any]:
    merged = {name: value | changes.pop(name, {}) for name, value in TWO_EPOCHS.items()}
    return merged | changes


def legs(home: Path, stops: list[int], **changes: Any) -> list[Collected]:
    """The run of `settings(**changes)`, interrupted after the updates in `stops` and resumed each time."""
    done: list[Collected] = []
    for number, stop in enumerate([*stops, 0]):
        options = settings(**changes)
        if done:
            options["resume_from"] = checkpoint_of(done[-1][0], stops[number - 1])
        done.append(run_training(home / f"leg {number}", stop_at(stop), **options))
    return done


def contents(run: RunDir, step: int) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, the adapter's and the optimizer's."""
    folder = run.checkpoints / f"step-{step:06d}"
    return load_file(folder / "adapter_model.safetensors") | load_file(folder / "state.safetensors")


def assert_same(one: dict[str, Tensor], two: dict[str, Tensor]) -> None:
    assert set(one) == set(two)
    assert [name for name in one if not torch.equal(one[name], two[name])] == []


def told(events: list[Event]) -> list[tuple[Any, ...]]:
    """Everything steps and validations say but their time and memory."""
    return [
        tuple(event.model_dump(exclude={"seq", "time", "seconds", "memory_bytes"}).values())
        for event in events
        if isinstance(event, Step | Validation)
    ]


@pytest.mark.parametrize("stops", [[3], [2], [4], [1, 2], [2, 5], [1, 2, 3, 4, 5]])
def test_interrupted_and_resumed_is_bit_for_bit_as_never_interrupted(stops: list[int], tmp_path: Path) -> None:
    """D2, D4: at the end of an epoch, in the middle of one, over many legs; noise, order, dropout, rates, Adam."""
    straight, events, _ = run_training(tmp_path / "straight", **settings())
    resumed = legs(tmp_path, stops)
    assert [said for leg in resumed for said in told(leg[1])] == told(events)
    assert_same(contents(resumed[-1][0], 6), contents(straight, 6))
    last, last_events, last_finished = resumed[-1]
    assert (last_finished.reason, last_finished.step, last_finished.epoch) == ("completed", 6, 2)
    assert of_kind(last_events, Started)[0].first_step == stops[-1] + 1
    assert of_kind(last_events, Started)[0].total_steps == 6
    ends = [(event.epoch, event.loss, event.updates) for leg in resumed for event in of_kind(leg[1], Epoch)]
    assert ends == [(event.epoch, event.loss, event.updates) for event in of_kind(events, Epoch)]
    states = [json.loads((Path(checkpoint_of(run, 6)) / "state.json").read_text()) for run in (straight, last)]
    for state in states:
        del state["config"]
    assert states[0] == states[1]


@pytest.mark.parametrize("optimizer", ["adafactor", "prodigy"])
@pytest.mark.parametrize("kind", ["dora", "lokr"])
def test_every_optimizer_and_adapter_resumes_exactly(optimizer: str, kind: str, tmp_path: Path) -> None:
    rate = 1.0 if optimizer == "prodigy" else 0.01
    changes: dict[str, Any] = {
        "training": {"optimizer": optimizer, "learning_rate": rate, "scheduler": "cosine_with_restarts"},
        "adapter": {"type": kind, "decompose_factor": 4},
        "dataset": {"validation_fraction": 0.2},
    }
    straight, events, _ = run_training(tmp_path / "straight", **settings(**changes))
    resumed = legs(tmp_path, [3], **changes)
    assert told(resumed[0][1]) + told(resumed[1][1]) == told(events)
    assert len(of_kind(events, Validation)) == 2
    assert_same(contents(resumed[1][0], 4), contents(straight, 4))


def test_state_as_8_bit_adamw_keeps_it_resumes_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its package is for cuda: what is particular about how it keeps its state, here on the CPU."""

    class AdamW8bit(torch.optim.SGD):
        """Momentum in 8 bits by a table that all parameters share; a whole number as the step; nested in state_dict."""

        table = torch.linspace(-0.1, 0.1, 256)

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    state = self.state[parameter]
                    if not state:
                        state |= {"step": 0, "state1": torch.full_like(parameter, 128, dtype=torch.uint8)}
                        state["qmap1"] = self.table
                    state["step"] += 1
                    momentum = state["qmap1"][state["state1"].long()] * 0.9 + parameter.grad
                    state["state1"] = torch.bucketize(momentum.clamp(-0.1, 0.1), self.table).to(torch.uint8)
                    with torch.no_grad():
                        parameter -= group["lr"] * momentum / state["step"]

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            (group,) = self.param_groups
            for parameter, state in zip(group["params"], state_dict["state"].values(), strict=True):
                assert state["state1"].dtype == torch.uint8
                self.state[parameter] = state

        def state_dict(self) -> dict[str, Any]:
            found = super().state_dict()
            found["state"] = {index: {"nested": values} for index, values in found["state"].items()}
            return found

    monkeypatch.setattr(
        optim,
        "make_optimizer",
        lambda trained, training, device: AdamW8bit(trained.values(), lr=training.learning_rate),
    )
    changes = {"training": {"optimizer": "adamw8bit"}}
    straight, events, _ = run_training(tmp_path / "straight", **settings(**changes))
    resumed = legs(tmp_path, [2], **changes)
    assert told(resumed[0][1]) + told(resumed[1][1]) == told(events)
    assert_same(contents(resumed[1][0], 6), contents(straight, 6))
    assert torch.uint8 in {tensor.dtype for tensor in contents(straight, 6).values()}


def test_a_stop_in_the_middle_of_a_window_takes_the_window_up_again_whole(tmp_path: Path) -> None:
    """The stop comes after the first of two batches of window 2: its gradient must not be counted twice or lost."""
    straight, events, _ = run_training(tmp_path / "straight", **settings())
    computed = 0
    honest = objective.sample_losses
    run = make_run(tmp_path / "first", **settings())

    def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
        nonlocal computed
        computed += 1
        if computed == 3:
            run.stop.touch()
        return honest(prediction, latents, noise)

    first: list[Event] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(objective, "sample_losses", sample_losses)
        finished = train(run, run.load_config(), first.append)
    assert (finished.reason, finished.step, computed) == ("stopped", 1, 3)
    second, rest, _ = run_training(tmp_path / "second", **settings(resume_from=checkpoint_of(run, 1)))
    assert told(first) + told(rest) == told(events)
    assert_same(contents(second, 6), contents(straight, 6))


def test_skipped_windows_are_counted_over_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of five windows is bad; the stop comes after the third."""
    spoil_gradients(monkeypatch, lambda window: window == 2)
    options = {"training": {"epochs": 1, "gradient_accumulation": 1}}
    first, second = legs(tmp_path, [2], **options)
    (epoch,) = of_kind(second[1], Epoch)
    assert (epoch.updates, epoch.skipped) == (4, 1)
    losses = [step.loss or 0 for leg in (first, second) for step in steps(leg[1])]
    assert len(losses) == 4
    assert epoch.loss == pytest.approx(sum(losses) / 4)
    assert second[2].message == "Trained 4 steps in 1 epoch on 5 samples. This run made steps 3 to 4."


def test_more_epochs_plan_the_schedule_again_with_a_rate_above_zero_at_once(tmp_path: Path) -> None:
    whole, events, _ = run_training(tmp_path / "whole", **settings())
    longer = settings(training={"epochs": 5}, resume_from=checkpoint_of(whole, 6))
    _, more, finished = run_training(tmp_path / "longer", **longer)
    assert (finished.reason, finished.step) == ("completed", 15)
    assert of_kind(more, Started)[0].total_steps == 15
    rates = [step.learning_rate for step in steps(more)]
    assert steps(events)[-1].learning_rate == pytest.approx(0.01 * 0.01)
    assert rates[0] > 0.005
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] == pytest.approx(0.01 * 0.01)
    assert [step.step for step in steps(more)] == list(range(7, 16))
    straight = run_training(tmp_path / "straight", **settings(training={"epochs": 5}))[1]
    assert rates == [step.learning_rate for step in steps(straight)][6:]


def test_a_validation_that_a_stop_interrupted_is_made_up_for(tmp_path: Path) -> None:
    options = settings(dataset={"validation_fraction": 0.4}, training={"save_every_epochs": 1})
    _, events, _ = run_training(tmp_path / "straight", **options)

    def stop_after_the_first_epoch(run: RunDir, event: Event) -> None:
        if isinstance(event, Epoch) and event.epoch == 1:
            run.stop.touch()

    parent, first, finished = run_training(tmp_path / "parent", stop_after_the_first_epoch, **options)
    assert (finished.reason, finished.step) == ("stopped", 2)
    assert (
        of_kind(first, Warning)[0].message == "A stop was asked for while validating: epoch 1 has no validation loss."
    )
    _, rest, _ = run_training(tmp_path / "child", **options | {"resume_from": checkpoint_of(parent, 2)})
    assert told(first) + told(rest) == told(events)
    assert [(seen.epoch, seen.step) for seen in of_kind(rest, Validation)] == [(1, 2), (2, 4)]


def test_a_resumed_run_that_is_stopped_at_once_has_the_checkpoint_itself(tmp_path: Path) -> None:
    """G7: its parent may be deleted."""
    validated = settings(dataset={"validation_fraction": 0.2}, training={"gradient_accumulation": 4})
    straight, events, _ = run_training(tmp_path / "straight", **validated)

    def stop_after_the_first_checkpoint(run: RunDir, event: Event) -> None:
        if isinstance(event, Validation):
            run.stop.touch()

    parent, first, _ = run_training(tmp_path / "parent", stop_after_the_first_checkpoint, **validated)

    def stop_before_the_first_step(run: RunDir, event: Event) -> None:
        if isinstance(event, Started):
            run.stop.touch()

    resumed = validated | {"resume_from": checkpoint_of(parent, 1)}
    child, _, finished = run_training(tmp_path / "child", stop_before_the_first_step, **resumed)
    assert (finished.reason, finished.step) == ("stopped", 1)
    assert finished.message == "Stopped after step 1 of 2; checkpoint saved."
    assert child.list_checkpoints() == parent.list_checkpoints()
    assert child.list_checkpoints()[0].validation_loss is not None
    parent.delete()
    grandchild, rest, _ = run_training(tmp_path, **validated | {"resume_from": checkpoint_of(child, 1)})
    assert told(first) + told(rest) == told(events)
    assert_same(contents(grandchild, 2), contents(straight, 2))


def test_the_parents_files_are_untouched(tmp_path: Path) -> None:
    """D1."""

    def hashes(run: RunDir) -> dict[str, str]:
        files = [path for path in run.path.rglob("*") if path.is_file()]
        return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}

    parent, _, _ = run_training(tmp_path / "home", stop_at(3), **settings())
    before = hashes(parent)
    assert len(before) >= 5
    child, events, _ = run_training(tmp_path / "home", **settings(resume_from=checkpoint_of(parent, 3)))
    assert child.path != parent.path
    assert hashes(parent) == before
    message = of_kind(events, Phase)[2].message
    assert message.startswith(f"Resuming after step 3 of {checkpoint_of(parent, 3)}: 64 of 64 tensors of the adapter")
    assert "192 of 192 of the optimizer matched" in message


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run of two epochs that was stopped after step 4."""
    return run_training(tmp_path_factory.mktemp("stopped"), stop_at(4), **settings())[0]


@pytest.fixture
def copy(stopped: RunDir, tmp_path: Path) -> Path:
    """Its checkpoint, to be damaged."""
    return Path(shutil.copytree(checkpoint_of(stopped, 4), tmp_path / "step-000004"))


def problems(**changes: Any) -> dict[str, str]:
    """What is said of settings before a trainer is started."""
    with pytest.raises(ConfigError) as caught:
        validate(fixture_settings(**settings(**changes)))
    return caught.value.fields


def test_a_checkpoint_can_be_resumed_as_it_is(copy: Path) -> None:
    assert validate(fixture_settings(**settings(resume_from=str(copy)))).resume_from == str(copy)


def test_nothing_left_to_do_is_refused_at_the_field(stopped: RunDir, tmp_path: Path) -> None:
    whole = run_training(tmp_path, **settings(resume_from=checkpoint_of(stopped, 4)))[0]
    found = problems(resume_from=checkpoint_of(whole, 6))
    assert found == {
        "training.epochs": "2 was given and the checkpoint has done 2: nothing is left to do. "
        "Give more than 2 to train on."
    }
    assert set(problems(training={"epochs": 1}, resume_from=checkpoint_of(stopped, 4))) == {"training.epochs"}
    with pytest.raises(SourceError, match="nothing is left to do"):  # the trainer looks for itself
        run_training(tmp_path, **settings(resume_from=checkpoint_of(whole, 6)))


def test_other_settings_are_refused_each_at_its_field(copy: Path) -> None:
    found = problems(
        resume_from=str(copy),
        adapter={"rank": 8, "targets": ["mlp"]},
        training={"learning_rate": 0.5, "epochs": 9, "gradient_checkpointing": "full", "save_every_epochs": 3},
    )
    assert set(found) == {"adapter.rank", "adapter.targets", "training.learning_rate"}
    assert found["training.learning_rate"].startswith("0.5 was given, the run to resume has 0.01.")
    assert found["adapter.targets"].startswith("mlp was given, the run to resume has self_attention, cross_attention.")


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("position", -1, "position"),
        ("position", 1, "position 1 is not between two windows of 2 samples"),
        ("position", 10**6, "position 1000000 is not between two windows"),
        ("samples", 0, "samples"),
        ("epoch", 0, "epoch"),
        ("step", 0, "step"),
        ("step", 11, "step 11 can not be reached in 2 epochs of 5 samples"),
        ("step", True, "step"),
        ("step", "4", "step"),
        ("loss_sum", float("nan"), "loss_sum"),
        ("loss_samples", -1, "loss_samples"),
        ("optimizer", {"counters": {"d": float("inf")}, "numbers": {}, "shapes": {}}, "optimizer.counters.d"),
        ("more", 1, "more"),
        ("version", 2, "is of version 2, this Descant resumes version 1"),
    ],
)
def test_a_state_that_no_run_can_have_is_refused(key: str, value: Any, words: str, copy: Path) -> None:
    state = json.loads((copy / "state.json").read_text())
    (copy / "state.json").write_text(json.dumps(state | {key: value}))
    assert words in problems(resume_from=str(copy))["resume_from"]


def test_options_of_the_optimizer_come_from_the_settings_not_from_the_state(copy: Path, tmp_path: Path) -> None:
    state = json.loads((copy / "state.json").read_text())
    state["optimizer"]["counters"] = {"weight_decay": 1000.0}
    (copy / "state.json").write_text(json.dumps(state))
    straight, _, _ = run_training(tmp_path / "straight", **settings())
    resumed, _, _ = run_training(tmp_path / "resumed", **settings(resume_from=str(copy)))
    assert_same(contents(resumed, 6), contents(straight, 6))


@pytest.mark.parametrize("name", ["state.json", "state.safetensors", "adapter_model.safetensors"])
def test_a_checkpoint_without_a_file_is_refused_by_its_name(name: str, copy: Path) -> None:
    """D1: no quiet fresh run."""
    (copy / name).unlink()
    assert problems(resume_from=str(copy))["resume_from"].startswith(f"{copy} has no {name}, so it can't be resumed")


def test_what_is_no_checkpoint_is_refused(copy: Path, tmp_path: Path) -> None:
    missing = problems(resume_from=str(tmp_path / "gone"))
    assert missing == {"resume_from": f"There is no folder {tmp_path / 'gone'}."}
    theirs = problems(resume_from=str(FIXTURE / "resume_checkpoint"))["resume_from"]
    assert "give the folder under Start from" in theirs
    (copy / "state.json").write_text('{"step": 4, "epoch": 2}')  # as an early version left it
    assert "is of version None, this Descant resumes version 1" in problems(resume_from=str(copy))["resume_from"]
    (copy / "state.json").write_text('{"version": 1, "step": 4, "epoch": 2}')
    assert "is not the sound state of a run: position, samples" in problems(resume_from=str(copy))["resume_from"]
    (copy / "state.json").write_text("{")
    assert "is not valid JSON" in problems(resume_from=str(copy))["resume_from"]
    both = problems(resume_from=str(copy), start_from=str(copy))
    assert both == {"resume_from": "Start from is filled in too; a run can have one of them."}


def rewrite(path: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    save_file(change(load_file(path)), path)


Q = "base_model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("adapter_model", lambda t: {n + "x": x for n, x in t.items()}, "64 of the 64 tensors in"),
        ("adapter_model", lambda t: t | {Q: torch.zeros(5, 64)}, "in 1 of its 32 modules some tensors are missing, of"),
        ("state", lambda t: t | {f"{Q}/exp_avg": torch.zeros(5, 64)}, "191 of 192 match, 1 of another shape"),
        ("state", lambda t: {n: x for n, x in t.items() if n != f"{Q}/exp_avg"}, "191 of 192 match, 1 missing"),
        ("state", lambda t: t | {"more": torch.zeros(1)}, "192 of 192 match, 1 unexpected (more)"),
        ("state", lambda t: t | {f"{Q}/exp_avg": torch.full((4, 64), torch.nan)}, "holds NaN or infinite values"),
    ],
)  # fmt: skip
def test_changed_tensors_are_refused_with_counts(
    file: str, change: Any, words: str, copy: Path, tmp_path: Path
) -> None:
    """D5."""
    rewrite(copy / f"{file}.safetensors", change)
    with pytest.raises(SourceError) as caught:
        run_training(tmp_path, **settings(resume_from=str(copy)))
    assert words in str(caught.value)


def test_another_base_model_or_data_set_is_refused(copy: Path, tmp_path: Path) -> None:
    model = Path(shutil.copytree(FIXTURE / "checkpoint", tmp_path / "model"))
    moved = settings(resume_from=str(copy), model={"source": str(model)})
    assert run_training(tmp_path / "moved", **moved)[2].reason == "completed"  # moved, but the same
    rewrite(model / "model.safetensors", lambda t: t | {"decoder.norm_out.weight": t["decoder.norm_out.weight"] + 0.1})
    with pytest.raises(SourceError, match=r"base model .* is not the one that .*step-000004 was trained on"):
        run_training(tmp_path, **moved)

    shutil.copy(FIXTURE / "checkpoint" / "model.safetensors", model)
    described = json.loads((FIXTURE / "checkpoint" / "config.json").read_text())
    for change in ({"is_turbo": True}, {"timestep_mu": 2.0}, {"rope_theta": 10}, {"sliding_window": 1}):
        (model / "config.json").write_text(json.dumps(described | change))
        with pytest.raises(SourceError, match="base model"):
            run_training(tmp_path, **moved)
    (model / "config.json").write_text(json.dumps(described))
    rewrite(model / "model.safetensors", lambda t: t | {"null_condition_emb": t["null_condition_emb"] + 5})
    with pytest.raises(SourceError, match="base model"):
        run_training(tmp_path, **moved)

    data = Path(shutil.copytree(FIXTURE / "tensors", tmp_path / "data"))
    moved = settings(resume_from=str(copy), dataset={"source": str(data)})
    assert run_training(tmp_path / "moved data", **moved)[2].reason == "completed"
    shutil.copy(data / "1a2b3c4d.pt", data / "2b3c4d5e.pt")
    with pytest.raises(SourceError, match=r"data set .* is not the one .* 5 samples now, 5 then, or other contents"):
        run_training(tmp_path, **moved)


def test_half_precision_state_is_cast_to_fp32_and_said(copy: Path, tmp_path: Path) -> None:
    def halve(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor.bfloat16() if tensor.dim() else tensor for name, tensor in tensors.items()}

    rewrite(copy / "state.safetensors", halve)
    rewrite(copy / "adapter_model.safetensors", halve)
    run, events, finished = run_training(tmp_path, **settings(resume_from=str(copy)))
    assert [warning.message for warning in of_kind(events, Warning)] == [
        "64 of 64 adapter tensors were not in fp32; cast to it.",
        "128 of 192 optimizer tensors were in half precision; cast to fp32.",
    ]
    assert finished.reason == "completed"
    assert {tensor.dtype for tensor in contents(run, 6).values()} == {torch.float32}


def test_going_on_in_another_precision_is_allowed_and_said(copy: Path, tmp_path: Path) -> None:
    options = settings(resume_from=str(copy), hardware={"precision": "bf16-mixed"})
    _, events, finished = run_training(tmp_path, **options)
    assert finished.reason == "completed"
    (warning,) = (event for event in of_kind(events, Warning) if "continues" in event.message)
    assert warning.message.startswith("The run was on cpu with 32-true and continues on cpu with bf16-mixed")


def test_going_on_with_the_base_held_otherwise_is_allowed_and_said(copy: Path, tmp_path: Path) -> None:
    _, events, finished = run_training(tmp_path, **settings(resume_from=str(copy), model={"base_dtype": "bf16"}))
    assert finished.reason == "completed"
    (warning,) = of_kind(events, Warning)
    assert warning.message == "The run had base weights in fp32 and continues with them in bf16."


def test_the_fp16_scale_is_taken_up_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """16-mixed is offered on cuda only; its arithmetic runs here on the CPU."""
    monkeypatch.setattr(precision, "choose", lambda *rest: ("cpu", "16-mixed"))
    fabrics: list[Any] = []
    make = precision.make_fabric

    def make_fabric(*arguments: Any) -> Any:
        fabrics.append(make(*arguments))
        scaler = fabrics[-1].strategy.precision.scaler
        scaler.load_state_dict(scaler.state_dict() | {"scale": 2.0 ** (10 + len(fabrics)), "_growth_tracker": 5})
        return fabrics[-1]

    monkeypatch.setattr(precision, "make_fabric", make_fabric)
    _, second = legs(tmp_path, [4])
    assert second[2].reason == "completed"
    assert fabrics[1].strategy.precision.scaler.state_dict()["_growth_tracker"] == 5 + 6
    assert fabrics[1].strategy.precision.scaler.get_scale() == 2.0**11


@pytest.mark.parametrize("start", ["own", "adapter", "resume_checkpoint"])
def test_a_warm_start_takes_the_weights_and_says_that_it_is_one(start: str, copy: Path, tmp_path: Path) -> None:
    """D1. Descant's checkpoints without their state, and both folders that ACE-Step's trainer leaves."""
    folder = copy if start == "own" else FIXTURE / start
    if start == "own":
        (copy / "state.json").unlink()
    still = settings(start_from=str(folder), training={"learning_rate": 1e-12, "epochs": 1, "warmup_steps": 0})
    config = validate(fixture_settings(**still))
    run, events, finished = run_training(tmp_path, **still)
    place = folder / "adapter" if start == "resume_checkpoint" else folder
    assert of_kind(events, Phase)[2].message == (
        f"Starting from {place}: 64 of 64 tensors matched, 0 of them cast to fp32. Optimizer, schedule and steps begin "
        "anew."
    )
    assert config.start_from == str(folder)
    assert (of_kind(events, Started)[0].first_step, finished.step) == (1, 3)
    before = load_file(place / "adapter_model.safetensors")
    for name, tensor in weights(run, "step-000003").items():
        assert torch.allclose(tensor, before[name], atol=1e-8)


def test_an_adapter_that_does_not_fit_the_settings_is_refused_at_the_fields() -> None:
    found = problems(
        start_from=str(FIXTURE / "resume_checkpoint"), adapter={"rank": 16, "alpha": 4, "rank_stabilized": True}
    )
    assert found == {
        "adapter.rank": "16 was given, the adapter to start from has 4: set 4, or leave it out.",
        "adapter.alpha": "4 was given, the adapter to start from has 8: set 8, or leave it out.",
        "adapter.rank_stabilized": "on was given, the adapter to start from has off: set off, or leave it out.",
    }
    found = problems(start_from=str(FIXTURE / "adapter"), adapter={"type": "lokr"})
    assert found["adapter.type"] == "lokr was given, the adapter to start from has lora: set lora, or leave it out."


def test_a_folder_without_an_adapter_is_refused(tmp_path: Path) -> None:
    found = problems(start_from=str(FIXTURE / "checkpoint"))["start_from"]
    assert "holds no adapter for ACE-Step 1.5 that Descant knows: 0 of its 165 tensors (" in found
    found = problems(start_from=str(tmp_path))["start_from"]
    assert found == (
        f"{tmp_path} is not the folder of an adapter: it has no adapter_config.json and adapter_model.safetensors, nor "
        "any .safetensors file."
    )
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "ia3"))
    (folder / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    assert "holds a IA3 adapter; this takes LoRA, DoRA and LoKr" in problems(start_from=str(folder))["start_from"]


@pytest.mark.parametrize(
    "odd",
    [{"alpha_pattern": {"q_proj": 64}}, {"modules_to_save": ["norm"]}, {"bias": "all"}, {"init_lora_weights": "pissa"}],
)
def test_an_adapter_with_more_than_descant_trains_is_refused(odd: dict[str, Any], tmp_path: Path) -> None:
    """E2: its strength would be another."""
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "odd"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | odd))
    assert "which Descant does not train" in problems(start_from=str(folder))["start_from"]


def test_an_adapter_on_other_targets_is_refused_with_counts(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match=r"0 of 24 match, 24 missing .* 64 unexpected"):
        run_training(tmp_path, **settings(start_from=str(FIXTURE / "adapter"), adapter={"targets": ["mlp"]}))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"r": "4"}, "r is '4', not a number"),
        ({"r": True}, "r is True, not a number"),
        ({"lora_alpha": None}, "lora_alpha is None, not a number"),
    ],
)
def test_a_description_without_numbers_is_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "odd"))
    described = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(described | change))
    assert words in problems(start_from=str(folder))["start_from"]


@pytest.mark.parametrize(
    ("dtype", "words"),
    [
        (torch.int32, "holds tensors that are no weights"),
        (torch.bool, "holds tensors that are no weights"),
        (torch.float64, "holds NaN or infinite values"),
        (torch.float8_e4m3fn, None),
    ],
)
def test_weights_of_odd_types_are_refused_or_cast(dtype: torch.dtype, words: str | None, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(FIXTURE / "adapter", tmp_path / "odd"))
    factor = 1e300 if dtype == torch.float64 else 1  # finite, but not as fp32
    weights = folder / "adapter_model.safetensors"
    rewrite(weights, lambda t: {name: (tensor.double() * factor).to(dtype) for name, tensor in t.items()})
    if words:
        with pytest.raises(SourceError, match=words):
            run_training(tmp_path, **settings(start_from=str(folder)))
    else:
        _, events, finished = run_training(tmp_path, **settings(start_from=str(folder)))
        assert "64 of 64 tensors matched, 64 of them cast to fp32." in of_kind(events, Phase)[2].message
        assert finished.reason == "completed"
