"""Linear layers that hold their weight in bf16 or fp32: they compute as plain ones do with the rounded weight."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from tests.conftest import FIXTURE
from tests.trainer_core.conftest import EVERYWHERE, KINDS
from tests.trainer_core.test_model import output
from trainer_core import adapter, model
from trainer_core.config import AdapterConfig, BaseDtype
from trainer_core.frozen_linear import FrozenLinear, QuantizedLinear

CHECKPOINT = str(FIXTURE / "checkpoint")


def layers(bias: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[FrozenLinear, nn.Linear]:
    """A frozen layer that holds its weight in `dtype`, and a plain one in fp32 with the same rounded weight."""
    torch.manual_seed(0)
    plain = nn.Linear(48, 80, bias=bias).requires_grad_(False)
    plain.weight.copy_(plain.weight.bfloat16())
    frozen = FrozenLinear(48, 80, bias, "meta", dtype)
    frozen.bias = plain.bias
    frozen.hold(plain.weight)
    assert frozen.weight.dtype == dtype
    return frozen, plain


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(48,), (5, 48), (2, 7, 48), (2, 3, 4, 48)])
def test_products_and_gradients_are_those_of_fp32_with_the_rounded_weight(shape: tuple[int, ...], bias: bool) -> None:
    found = []
    for layer in layers(bias):
        inputs = torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = layer(inputs)
        torch.autograd.backward(outputs.square().sum())
        assert inputs.grad is not None
        found.append((outputs.detach(), inputs.grad))
        assert all(parameter.grad is None for parameter in layer.parameters())
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == torch.float32
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("autocast", [True, False])
def test_no_copy_of_the_weight_is_kept_for_the_way_back(dtype: torch.dtype, autocast: bool) -> None:
    frozen, plain = layers(bias=True, dtype=dtype)
    kept: dict[str, list[Tensor]] = {"frozen": [], "plain": []}
    for name, layer in (("frozen", frozen), ("plain", plain)):

        def keep(tensor: Tensor, into: list[Tensor] = kept[name]) -> Tensor:
            into.append(tensor)
            return tensor

        hooks = saved_tensors_hooks(keep, lambda tensor: tensor)
        with hooks, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            layer(torch.randn(3, 48, requires_grad=True))
    assert kept["plain"]  # the way this is measured sees a weight
    assert not kept["frozen"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_under_autocast_it_computes_as_a_plain_layer_does(dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 7, 48)
    with torch.autocast("cpu", torch.bfloat16):
        ours, theirs = (layer(inputs) for layer in layers(True, dtype))
    assert ours.dtype == torch.bfloat16
    assert torch.equal(ours, theirs)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # done by PyTorch itself
def test_checkpointed_and_compiled_it_computes_the_same() -> None:
    frozen, _ = layers(bias=True)
    block = nn.Sequential(frozen, nn.GELU())
    ways: list[Callable[[Tensor], Tensor]] = [
        block,
        lambda inputs: checkpoint(block, inputs, use_reentrant=False),
        torch.compile(block, backend="aot_eager", fullgraph=True),
    ]
    inputs = torch.randn(2, 7, 48)
    gradients = []
    for way in ways:
        leaf = inputs.clone().requires_grad_()
        torch.autograd.backward(way(leaf).square().sum())
        assert leaf.grad is not None
        gradients.append(leaf.grad)
    assert torch.equal(gradients[0], gradients[1])
    assert torch.equal(gradients[0], gradients[2])


@pytest.mark.parametrize("kind", ["LoRA", "DoRA", "LoKr"])
def test_every_kind_of_adapter_learns_on_it_as_on_the_rounded_weights_in_fp32(kind: str) -> None:
    learned = []
    for base_dtype in ("bf16", "fp32"):
        loaded = model.load(CHECKPOINT, base_dtype=base_dtype)
        for module in loaded.transformer.modules():
            if isinstance(module, nn.Linear):
                module.weight.data = module.weight.bfloat16().to(module.weight.dtype)
        torch.manual_seed(0)
        adapter.inject(loaded.transformer, AdapterConfig.model_validate({"targets": EVERYWHERE} | KINDS[kind]))
        trained = dict(adapter.trainable(loaded.transformer))
        prediction = output(loaded, gradients=True)
        torch.autograd.backward(prediction.square().mean())
        learned.append((prediction, {name: parameter.grad for name, parameter in trained.items()}))
    (prediction, gradients), (expected, expected_gradients) = learned
    assert (prediction - expected).abs().max() <= 1e-6
    assert gradients.keys() == expected_gradients.keys()
    for name, gradient in gradients.items():
        wanted = expected_gradients[name]
        assert gradient is not None
        assert wanted is not None
        assert (gradient - wanted).norm() <= 1e-5 * wanted.norm()


def bitsandbytes() -> None:
    """Not installed with what tests need: PEFT imports it in every trainer, which takes each a second more."""
    pytest.importorskip("bitsandbytes")


@pytest.mark.parametrize(("base_dtype", "off", "packed"), [("int8", 0.01, 1.0), ("nf4", 0.12, 0.5)])
def test_quantised_weights_are_near_what_they_were_and_small(base_dtype: BaseDtype, off: float, packed: float) -> None:
    """By bitsandbytes on the CPU, as on cuda: how far they are from the weights, and their bytes a number."""
    bitsandbytes()
    torch.manual_seed(0)
    plain = nn.Linear(128, 96).requires_grad_(False)
    layer = QuantizedLinear(plain, base_dtype)
    layer.hold(plain.weight)
    error = (layer.dense(torch.float32) - plain.weight).norm() / plain.weight.norm()
    assert 0 < error < off
    assert layer.packed.nbytes == packed * plain.weight.numel()
    found = []
    for computed in (layer, lambda inputs: nn.functional.linear(inputs, layer.dense(torch.float32), plain.bias)):
        inputs = torch.randn(2, 7, 128, generator=torch.Generator().manual_seed(1)).requires_grad_()
        outputs = computed(inputs)
        torch.autograd.backward(outputs.square().sum())
        found.append((outputs, inputs.grad))
    for ours, theirs in zip(*found, strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("base_dtype", "off"), [("int8", 0.05), ("nf4", 0.5)])
def test_a_lora_learns_on_a_quantised_base(base_dtype: BaseDtype, off: float) -> None:
    bitsandbytes()
    loaded = model.load(CHECKPOINT, base_dtype=base_dtype)
    exact = output(model.load(CHECKPOINT))
    quantised = [module for module in loaded.transformer.layers.modules() if isinstance(module, QuantizedLinear)]
    assert len(quantised) == 11 * len(loaded.transformer.layers)
    assert 0 < (output(loaded) - exact).norm() / exact.norm() < off
    adapter.inject(loaded.transformer, AdapterConfig(rank=4, targets=EVERYWHERE[:3]))
    trained = [parameter for _, parameter in adapter.trainable(loaded.transformer)]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    losses = []
    for _ in range(5):
        loss = output(loaded, gradients=True).square().mean()
        losses.append(loss.item())
        torch.autograd.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.9 * losses[0]
