"""First and last layer as products give what diffusers' convolutions give, in a layout that suits the blocks."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.trainer_core.test_attention import outputs_and_gradients
from trainer_core import adapter, model
from trainer_core.config import AdapterConfig
from trainer_core.patches import use_patches


@pytest.mark.parametrize(("autocast", "bound"), [(False, 1e-5), (True, 4e-2)])
@pytest.mark.parametrize("patch", [1, 2, 3])
@pytest.mark.parametrize("frames", [30, 31])
def test_products_over_patches_compute_what_convolutions_do(
    frames: int, patch: int, autocast: bool, bound: float
) -> None:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16, "patch_size": patch}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "encoder_hidden_size": 32}
    plain = model.build(sizes | heads).requires_grad_(False)
    adapter.inject(plain, AdapterConfig(rank=4))
    for _, parameter in adapter.trainable(plain):
        torch.nn.init.normal_(parameter, std=0.1)
    ours = copy.deepcopy(plain)
    use_patches(ours)
    assert ours.state_dict().keys() == plain.state_dict().keys()
    seen: list[Tensor] = []

    def look(module: nn.Module, inputs: tuple[Tensor], output: Tensor) -> None:
        seen.append(output)
        output.register_hook(seen.append)  # type: ignore[no-untyped-call]

    for each in (ours, plain):
        each.layers[1].register_forward_hook(look)
    found, wanted = (outputs_and_gradients(each, frames, 2, autocast) for each in (ours, plain))
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= bound * other.abs().max()
    assert [each.is_contiguous() for each in seen] == [True, True, False, False]
