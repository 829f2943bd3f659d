"""Windows in bands give what the dense mask gives, whatever the length, batch, precision and way of computing."""

import copy
import time
from collections.abc import Callable

import pytest
import torch
from diffusers import AceStepTransformer1DModel
from diffusers.models.transformers import ace_step_transformer
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention

from trainer_core import adapter, attention
from trainer_core.attention import banded, use_training_attention
from trainer_core.config import AdapterConfig

WINDOW = 8
FP32, BF16 = 1e-5, 2e-2
"""How far apart outputs and gradients may be, of the largest value."""


@pytest.fixture
def dense() -> AceStepTransformer1DModel:
    """A model as diffusers computes it, with an adapter that does something."""
    torch.manual_seed(0)
    transformer = AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=WINDOW,
    )
    transformer.requires_grad_(False)
    for module in transformer.modules():
        if type(module).__name__ == "RMSNorm":
            nn.init.uniform_(module.weight, 0.5, 1.5)
    adapter.inject(transformer, AdapterConfig(rank=4))
    for name, parameter in adapter.trainable(transformer):
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return transformer


def outputs_and_gradients(
    transformer: AceStepTransformer1DModel, frames: int, batch: int, autocast: bool = False
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(frames)
    latents, context = (torch.randn(batch, frames, width, generator=generator) for width in (64, 128))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        (output,) = transformer(
            hidden_states=latents,
            timestep=torch.rand(batch, generator=generator),
            timestep_r=torch.zeros(batch),
            encoder_hidden_states=torch.randn(batch, 5, 32, generator=generator),
            context_latents=context,
            return_dict=False,
        )
    parameters = [parameter for _, parameter in adapter.trainable(transformer)]
    return [output, *torch.autograd.grad(output.float().square().mean(), parameters)]


def distance(found: list[Tensor], wanted: list[Tensor]) -> float:
    """The largest difference of outputs, of the largest output, or of gradients, of the largest gradient."""
    differences = [(one - other).abs().max() for one, other in zip(found, wanted, strict=True)]
    of_outputs = differences[0] / wanted[0].abs().max()
    of_gradients = max(differences[1:]) / max(gradient.abs().max() for gradient in wanted[1:])
    return max(of_outputs, of_gradients).item()


def checkpointed(transformer: AceStepTransformer1DModel) -> None:
    transformer.enable_gradient_checkpointing()


def compiled(transformer: AceStepTransformer1DModel) -> None:
    for block in transformer.layers:
        block.compile(backend="aot_eager")


# One token, a window and its neighbours, whole blocks and their neighbours, odd counts of frames.
@pytest.mark.parametrize("frames", [1, 16, 17, 18, 19, 32, 33, 34, 48, 63, 101])
@pytest.mark.parametrize("batch", [1, 3])
def test_bands_are_the_dense_mask(dense: AceStepTransformer1DModel, frames: int, batch: int) -> None:
    other = copy.deepcopy(dense)
    use_training_attention(other, banded)
    wanted = outputs_and_gradients(dense, frames, batch)
    assert distance(outputs_and_gradients(other, frames, batch), wanted) < FP32
    in_bf16 = outputs_and_gradients(dense, frames, batch, autocast=True)
    assert distance(outputs_and_gradients(other, frames, batch, autocast=True), in_bf16) < BF16


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler warns of what it does itself
@pytest.mark.parametrize("way", [checkpointed, compiled])
def test_bands_are_the_dense_mask_recomputed_and_compiled(
    dense: AceStepTransformer1DModel, way: Callable[[AceStepTransformer1DModel], None]
) -> None:
    other = copy.deepcopy(dense)
    use_training_attention(other, banded)
    way(other)
    wanted = outputs_and_gradients(dense, 63, 2)
    assert distance(outputs_and_gradients(other, 63, 2), wanted) < FP32


def test_a_token_further_than_a_window_away_changes_nothing() -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 60, 2, 8).unbind()
    near = banded(query, key, value, WINDOW, 0.3)
    value[:, 30], key[:, 30] = 1e4, 1e4
    changed = (banded(query, key, value, WINDOW, 0.3) != near).flatten(2).any(-1)[0].nonzero().flatten().tolist()
    assert (min(changed), max(changed)) == (30 - WINDOW, 30 + WINDOW)


def test_no_dense_mask_is_built(dense: AceStepTransformer1DModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def build(**sizes: object) -> Tensor:
        raise AssertionError("a dense mask was built")

    monkeypatch.setattr(ace_step_transformer, "_create_4d_mask", build)
    with pytest.raises(AssertionError, match="dense mask"):
        outputs_and_gradients(dense, 40, 1)
    use_training_attention(dense, banded)
    outputs_and_gradients(dense, 40, 1)


def test_dropout_in_attention_is_refused(dense: AceStepTransformer1DModel) -> None:
    dense.register_to_config(attention_dropout=0.1)
    with pytest.raises(ValueError, match=r"attention_dropout is 0\.1"):
        use_training_attention(dense, banded)


@pytest.mark.filterwarnings("ignore")  # that it is slow without its compiler
def test_flex_attention_sees_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As PyTorch computes it without compiling, forward: all else needs a card."""
    monkeypatch.setattr(attention, "compiled_flex", lambda: flex_attention)
    torch.manual_seed(0)
    for batch, length in ((2, 31), (1, 50)):
        query, key, value = (torch.randn(batch, length, heads, 16) for heads in (4, 2, 2))
        wanted = banded(query, key, value, WINDOW, 0.25)
        assert torch.allclose(attention.flex(query, key, value, WINDOW, 0.25), wanted, atol=1e-5)


def test_another_kernel_is_taken_only_if_it_is_equal_and_faster() -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(1, 512, heads, 8, requires_grad=True) for heads in (4, 2, 2)]

    def slower(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
        time.sleep(0.2)  # so much that no busy machine turns it round
        return banded(query, key, value, window, scale)

    def wrong(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
        return query * value.mean() * key.mean()

    assert not attention.is_better(slower, banded, inputs, WINDOW)
    assert attention.is_better(banded, slower, inputs, WINDOW)
    assert not attention.is_better(wrong, slower, inputs, WINDOW)


def test_on_the_cpu_windows_are_banded_unseen(dense: AceStepTransformer1DModel) -> None:
    assert attention.fastest(dense, 5000, torch.device("cpu")) is banded
