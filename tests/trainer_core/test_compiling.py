"""Blocks really compiled, or a compiler that fails: training is the same."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trainer_core.training import of_kind, run_training, steps, weights, write_samples
from trainer_core.events import Started, Warning


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    """PyTorch's compiler without graphs of before, and afterwards as it was."""
    import torch._dynamo
    import torch._functorch.config

    torch._dynamo.reset()
    lazy = torch._functorch.config.force_non_lazy_backward_lowering
    with torch._dynamo.config.patch(suppress_errors=False):
        yield
    torch._functorch.config.force_non_lazy_backward_lowering = lazy
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of what it does itself
def test_compiled_blocks_train_the_same_under_the_same_names(tmp_path: Path) -> None:
    """E6. One graph for windowed blocks, one for the others, one for the first, whose input needs no gradient."""
    import torch._dynamo.utils

    data = {"source": write_samples(tmp_path / "tensors", [(40, 5), (40, 5)])}
    options = {"epochs": 2, "learning_rate": 0.01, "warmup_steps": 0, "gradient_accumulation": 1}
    plain_run, plain_events, _ = run_training(tmp_path / "plain", dataset=data, training=options)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled = {"compile": True}
    run, events, finished = run_training(tmp_path / "compiled", dataset=data, training=options, hardware=compiled)
    assert finished.reason == "completed"
    assert of_kind(events, Started)[0].compiled
    assert not of_kind(events, Warning)
    assert not of_kind(plain_events, Started)[0].compiled
    assert [step.loss for step in steps(events)] == pytest.approx([step.loss for step in steps(plain_events)], rel=2e-5)
    (name,) = (folder.name for folder in run.checkpoints.iterdir())
    assert weights(run, name).keys() == weights(plain_run, name).keys()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 3


@pytest.mark.filterwarnings("ignore")
def test_blocks_that_cannot_be_compiled_train_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_by_nothing(block: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        block._compiled_call_impl = torch.compile(block._call_impl, backend=broken)

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler was found")

    plain = run_training(tmp_path / "plain")
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_nothing)
    _, events, finished = run_training(tmp_path / "broken", hardware={"compile": True})
    (warning,) = of_kind(events, Warning)
    assert "could not be compiled; training goes on without" in warning.message
    assert "no compiler was found" in warning.message
    assert not of_kind(events, Started)[0].compiled
    assert finished == plain[2]
    assert [step.loss for step in steps(events)] == [step.loss for step in steps(plain[1])]


@pytest.mark.filterwarnings("ignore")
def test_a_later_shape_that_cannot_be_compiled_backward_is_computed_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from functorch.compile import make_boxed_func  # type: ignore[import-untyped]
    from torch._dynamo.backends.common import aot_autograd

    failures = 0

    def backward(graph: Any, inputs: Any) -> Any:
        nonlocal failures
        if any(isinstance(value, torch.SymInt) for value in inputs):  # made for any length, when a second one comes
            failures += 1
            raise RuntimeError("no compiler for this")
        return make_boxed_func(graph.forward)

    def forward(graph: Any, inputs: Any) -> Any:
        return make_boxed_func(graph.forward)

    def compile_by_own(block: torch.nn.Module, *arguments: Any, **options: Any) -> None:
        backend = aot_autograd(fw_compiler=forward, bw_compiler=backward)
        block._compiled_call_impl = torch.compile(block._call_impl, backend=backend)

    data = {"source": write_samples(tmp_path / "tensors", [(40, 5), (60, 5)])}
    options = {"epochs": 2, "learning_rate": 0.01, "warmup_steps": 0, "gradient_accumulation": 1}
    plain = run_training(tmp_path / "plain", dataset=data, training=options)
    torch._dynamo.reset()
    monkeypatch.setattr(torch.nn.Module, "compile", compile_by_own)
    _, events, finished = run_training(tmp_path / "run", dataset=data, training=options, hardware={"compile": True})
    assert failures
    assert finished == plain[2]
    assert of_kind(events, Started)[0].compiled
    assert [step.loss for step in steps(events)] == pytest.approx([step.loss for step in steps(plain[1])], rel=2e-5)
