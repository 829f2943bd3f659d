"""The estimate against what a real step allocates, and what `auto` makes of it."""

import weakref
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.conftest import FIXTURE
from tests.trainer_core.training import of_kind, run_training
from trainer_core import (
    adapter,
    attention,
    dataset,
    free_memory,
    gradient_checkpointing,
    memory,
    model,
    precision,
    sample_shapes,
)
from trainer_core.attention import banded
from trainer_core.config import Checkpointing, RunConfig
from trainer_core.events import Started, Warning
from trainer_core.frozen_linear import FrozenLinear, use_frozen_layers
from trainer_core.lean_blocks import use_lean_blocks
from trainer_core.memory import Samples
from trainer_core.model_shape import Shape
from trainer_core.patches import use_patches
from trainer_core.sources import SourceError

SHAPE = Shape(
    hidden_size=160,
    intermediate_size=480,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=48,
    sliding_window=32,
)
SAMPLES = Samples(frames=400, condition_tokens=40, bytes=0)
EVERYWHERE = ["self_attention", "cross_attention", "mlp"]


class Allocated(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The most bytes at once in what operations make, beside tensors that were there before."""

    def __init__(self, before: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._before = {tensor.untyped_storage()._cdata for tensor in before}
        self._sizes: dict[int, int] = {}
        self._now = 0
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._before | self._sizes.keys():
                    self._sizes[storage._cdata] = storage.nbytes()
                    self._now += storage.nbytes()
                    weakref.finalize(storage, self._forget, storage._cdata)
        self.peak = max(self.peak, self._now)
        return result

    def _forget(self, storage: int) -> None:
        self._now -= self._sizes.pop(storage)


def measured(shape: Shape, config: RunConfig, number_format: str) -> int:
    """The bytes that a batch takes at its peak, forward and back, beside weights and gradients."""
    transformer = model.build(shape.model_dump()).requires_grad_(False)
    attention.use_training_attention(transformer, banded)
    use_lean_blocks(transformer)
    use_patches(transformer)
    weights = transformer.state_dict()
    use_frozen_layers(transformer, config.model.base_dtype)
    for name, module in transformer.named_modules():
        if isinstance(module, FrozenLinear):
            module.hold(weights[f"{name}.weight"])
            if module.bias is not None:
                module.bias = nn.Parameter(weights[f"{name}.bias"], requires_grad=False)
    adapter.inject(transformer, config.adapter)
    blocks = memory.recomputed(config.training.gradient_checkpointing, shape.num_hidden_layers)
    gradient_checkpointing.enable(transformer, blocks)
    transformer.train()
    for _, parameter in adapter.trainable(transformer):
        parameter.grad = torch.zeros_like(parameter)
    batch, frames = config.training.batch_size, SAMPLES.frames
    inputs = {
        "hidden_states": torch.randn(batch, frames, 64),
        "timestep": torch.rand(batch),
        "timestep_r": torch.rand(batch),
        "encoder_hidden_states": torch.randn(batch, SAMPLES.condition_tokens, shape.hidden_size),
        "context_latents": torch.randn(batch, frames, 128),
    }
    gradients = [parameter.grad for _, parameter in adapter.trainable(transformer) if parameter.grad is not None]
    fabric = precision.make_fabric("cpu", number_format)
    with Allocated([*transformer.parameters(), *transformer.buffers(), *gradients, *inputs.values()]) as allocated:
        with fabric.autocast():
            prediction = transformer(**inputs, return_dict=False)[0]
        mse_loss(prediction.float(), torch.randn(batch, frames, 64)).backward()  # type: ignore[no-untyped-call]
    return int(allocated.peak)


def settings(**sections: Any) -> RunConfig:
    return RunConfig.model_validate(sections)


def estimated(shape: Shape, config: RunConfig, number_format: str) -> int:
    """The same by the estimate."""
    expected = memory.estimate(shape, config, SAMPLES, number_format, config.training.gradient_checkpointing)
    return expected.activations + expected.working


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
@pytest.mark.parametrize("choice", ["off", 2, "full"])
@pytest.mark.parametrize(("dropout", "targets"), [(0.0, EVERYWHERE[:2]), (0.1, EVERYWHERE)])
def test_the_estimate_is_near_what_a_step_takes(
    kind: str, choice: Checkpointing, dropout: float, targets: list[str]
) -> None:
    config = settings(
        adapter={"type": kind, "rank": 12, "dropout": dropout, "targets": targets},
        training={"gradient_checkpointing": choice},
    )
    assert estimated(SHAPE, config, "32-true") == pytest.approx(measured(SHAPE, config, "32-true"), rel=0.15)


@pytest.mark.parametrize(("base_dtype", "choice"), [("fp32", "off"), ("fp32", "full"), ("bf16", 3)])
def test_the_estimate_knows_what_mixed_precision_keeps(base_dtype: str, choice: Checkpointing) -> None:
    """Copies of a norm's input, and of an adapter's; none of the weights."""
    config = settings(
        model={"base_dtype": base_dtype},
        adapter={"rank": 12},
        training={"batch_size": 2, "gradient_checkpointing": choice},
    )
    shape = SHAPE.model_copy(update={"num_hidden_layers": 3})  # bf16 is slow on many a CPU
    expected = estimated(shape, config, "bf16-mixed")
    assert expected == pytest.approx(measured(shape, config, "bf16-mixed"), rel=0.15)


@pytest.mark.parametrize("kind", ["lora", "dora", "lokr"])
def test_weights_and_adapter_are_counted_as_they_are(kind: str) -> None:
    config = settings(adapter={"type": kind, "targets": [*EVERYWHERE, "time_embed.linear_2", "condition_embedder"]})
    transformer = model.build(SHAPE.model_dump())
    base = sum(parameter.numel() for parameter in transformer.parameters())
    adapter.inject(transformer, config.adapter)
    trained = sum(parameter.numel() for _, parameter in adapter.trainable(transformer))
    expected = memory.estimate(SHAPE, config, SAMPLES, "32-true", "off")
    assert expected.weights == pytest.approx(4 * base, rel=0.01)
    assert (expected.adapter, expected.optimizer) == (4 * trained, 12 * trained)  # gradients, and AdamW's two moments
    assert expected.total == sum(expected.parts.values())


def test_auto_computes_the_fewest_blocks_again_that_fit() -> None:
    config = settings()
    choices: list[Checkpointing] = ["off", 6, 5, 4, 3, 2, "full"]
    plans = [memory.plan(SHAPE, config, SAMPLES, "32-true", choice, 0) for choice in choices]
    assert [len(plan.recomputed) for plan in plans] == [0, 1, 2, 2, 2, 3, 6]
    for free in range(0, 40_000_000, 500_000):
        fitting = [plan for plan in plans if plan.estimate.to_come <= 0.9 * free]
        fewest = min((len(plan.recomputed) for plan in fitting), default=6)
        chosen = memory.plan(SHAPE, config, SAMPLES, "32-true", "auto", free)
        assert len(chosen.recomputed) == fewest
        assert bool(chosen.shortage) == (not fitting)
        assert chosen.is_tight == (fewest == 6 or chosen.estimate.to_come * 2.5 > free)


def test_a_run_that_does_not_fit_even_so_says_it_with_figures_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "free_bytes", lambda device: 10_000_000)
    training = {"epochs": 1, "batch_size": 4, "warmup_steps": 0}
    _, events, _ = run_training(tmp_path, training=training)
    assert of_kind(events, Started)[0].gradient_checkpointing == "off"
    assert not of_kind(events, Warning)
    monkeypatch.setattr(precision, "free_bytes", lambda device: 1_000_000)
    _, events, finished = run_training(tmp_path, training=training)
    (warning,) = of_kind(events, Warning)
    assert warning.message.startswith("With gradient checkpointing full this run takes about 1.")
    assert "MB more, and 1.0 MB are free" in warning.message
    (started,) = of_kind(events, Started)
    assert started.gradient_checkpointing == "full"
    assert started.estimated_bytes
    assert finished.reason == "completed"


def test_free_memory_is_what_a_container_lets_the_machine_give(tmp_path: Path) -> None:
    assert 0 < free_memory.free_bytes() <= psutil.virtual_memory().total
    for name, content in (("max", "1000\n"), ("current", "700\n"), ("stat", "anon 500\ninactive_file 150\n")):
        (tmp_path / f"memory.{name}").write_text(content)
    assert free_memory.free_in_group(tmp_path) == 450
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.free_in_group(tmp_path) > 1 << 60


@pytest.mark.parametrize("source", ["demo", str(FIXTURE / "tensors")])
def test_samples_are_measured_without_torch_as_they_are_with_it(source: str) -> None:
    found, expected = sample_shapes.measure(source), dataset.sizes(dataset.load(source))
    assert (found.frames, found.condition_tokens) == (expected.frames, expected.condition_tokens)
    assert found.bytes == pytest.approx(expected.bytes, rel=0.5)  # a folder's files have names and masks too


@pytest.mark.parametrize("content", [b"", b"no zip", b"PK\x05\x06" + bytes(18)])
def test_what_holds_no_shapes_is_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    with pytest.raises(SourceError, match="can't be read from its largest file"):
        sample_shapes.measure(str(tmp_path))
