import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from tests.conftest import FIXTURE, make_run
from trainer_core import adapter, checkpoint, model
from trainer_core.config import AdapterConfig
from trainer_core.events import Checkpoint
from trainer_core.origin import TrainingState
from trainer_core.run_dir import RunDir

CONFIG = AdapterConfig(rank=4, alpha=8)


@pytest.fixture
def adapted() -> model.LoadedModel:
    """The fixture model with an adapter whose every tensor is random."""
    loaded = model.load(str(FIXTURE / "checkpoint"))
    adapter.inject(loaded.transformer, CONFIG)
    torch.manual_seed(0)
    for _, parameter in adapter.trainable(loaded.transformer):
        torch.nn.init.normal_(parameter, std=0.1)
    return loaded


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return make_run(tmp_path)


def save(run: RunDir, adapted: model.LoadedModel) -> Checkpoint:
    """A checkpoint of step 6 after one update, whose optimizer state is therefore not empty."""
    trained = [parameter for _, parameter in adapter.trainable(adapted.transformer)]
    optimizer = torch.optim.AdamW(trained, lr=0)
    for parameter in trained:
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer_state, tensors = checkpoint.optimizer_state(optimizer, adapted.transformer)
    state = TrainingState(
        step=6,
        epoch=2,
        position=5,
        samples=5,
        loss_sum=5.0,
        loss_samples=5,
        updates=3,
        skipped=0,
        consecutive_skips=0,
        validation_loss=None,
        device="cpu",
        precision="32-true",
        base_model="",
        dataset="",
        optimizer=optimizer_state,
        scaler=None,
        config=run.load_config(),
    )
    return checkpoint.save(run, adapted.transformer, "base", state, tensors)


def test_names_shapes_and_config_are_those_of_the_original_trainer(run: RunDir, adapted: model.LoadedModel) -> None:
    save(run, adapted)
    folder = run.checkpoints / "step-000006"
    theirs = load_file(FIXTURE / "adapter" / "adapter_model.safetensors")
    ours = load_file(folder / "adapter_model.safetensors")
    assert {name: tensor.shape for name, tensor in ours.items()} == {
        name: tensor.shape for name, tensor in theirs.items()
    }
    described = json.loads((folder / "adapter_config.json").read_text())
    original = json.loads((FIXTURE / "adapter" / "adapter_config.json").read_text())
    modules = [name.removeprefix("base_model.model.").split(".lora_")[0] for name in theirs]
    assert all(any(name.endswith(f".{target}") for target in described["target_modules"]) for name in modules)
    assert {target.rpartition(".")[2] for target in described["target_modules"]} == set(original["target_modules"])
    for key in (
        "peft_type",
        "r",
        "lora_alpha",
        "bias",
        "use_dora",
        "use_rslora",
        "inference_mode",
        "base_model_name_or_path",
    ):
        assert described[key] == original[key], key


def test_the_event_counts_what_is_in_the_file(run: RunDir, adapted: model.LoadedModel) -> None:
    """E6."""
    event = save(run, adapted)
    weights = run.checkpoints / event.name / "adapter_model.safetensors"
    with safe_open(weights, "pt") as file:
        assert len(list(file.keys())) == event.tensors == 64
    assert weights.stat().st_size == event.bytes
    (listed,) = run.list_checkpoints()
    assert (listed.name, listed.step, listed.epoch, listed.bytes) == (event.name, 6, 2, event.bytes)


def test_a_save_that_lacks_a_trained_tensor_fails_and_leaves_no_checkpoint(
    run: RunDir, adapted: model.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E6."""
    whole = adapter.tensors

    def all_but_one(transformer: Any) -> dict[str, torch.Tensor]:
        tensors = whole(transformer)
        tensors.popitem()
        return tensors

    monkeypatch.setattr(adapter, "tensors", all_but_one)
    with pytest.raises(
        checkpoint.CheckpointError, match=r"63 tensors were written .* 64 were trained; not as trained: base_model"
    ):
        save(run, adapted)
    assert run.list_checkpoints() == []


def test_a_save_with_a_wrong_value_fails(
    run: RunDir, adapted: model.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = adapter.tensors
    monkeypatch.setattr(adapter, "tensors", lambda transformer: {n: t + 1 for n, t in whole(transformer).items()})
    with pytest.raises(checkpoint.CheckpointError, match=r"64 tensors were written .* not as trained: .* 59 more"):
        save(run, adapted)
    assert run.list_checkpoints() == []


def test_a_save_cut_short_is_not_a_checkpoint_and_does_not_disturb_the_next(
    run: RunDir, adapted: model.LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def power_cut(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as context:
        context.setattr(adapter, "save_config", power_cut)
        with pytest.raises(OSError, match="No space left"):
            save(run, adapted)
    assert run.list_checkpoints() == []
    save(run, adapted)
    assert [saved.name for saved in run.list_checkpoints()] == ["step-000006"]
    assert [path.name for path in run.checkpoints.iterdir()] == ["step-000006"]
