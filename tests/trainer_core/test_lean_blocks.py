"""Lean norms and MLPs give what diffusers' give."""

import copy

import pytest
import torch
from diffusers import AceStepTransformer1DModel
from torch import Tensor

from tests.trainer_core.test_attention import outputs_and_gradients
from trainer_core import adapter
from trainer_core.config import AdapterConfig
from trainer_core.lean_blocks import use_lean_blocks


@pytest.mark.parametrize(("autocast", "bound"), [(False, 1e-5), (True, 4e-2)])
def test_lean_blocks_compute_what_diffusers_do(autocast: bool, bound: float) -> None:
    torch.manual_seed(0)
    plain = AceStepTransformer1DModel(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        encoder_hidden_size=32,
    ).requires_grad_(False)
    for name, parameter in plain.named_parameters():
        if "norm" in name:
            parameter.add_(torch.randn_like(parameter) / 4)
    adapter.inject(plain, AdapterConfig(rank=4, targets=["self_attention", "mlp"]))
    for _, parameter in adapter.trainable(plain):
        torch.nn.init.normal_(parameter, std=0.1)
    lean = copy.deepcopy(plain)
    use_lean_blocks(lean)
    assert lean.state_dict().keys() == plain.state_dict().keys()
    found, wanted = (outputs_and_gradients(each, 30, 2, autocast) for each in (lean, plain))
    assert len(wanted) == 1 + 2 * 7 * 3
    for one, other in zip(found, wanted, strict=True):
        assert one.dtype == other.dtype
        assert (one - other).abs().max() <= bound * other.abs().max()


def test_a_lean_mlp_keeps_its_gate_once_and_a_lean_norm_its_input_once() -> None:
    torch.manual_seed(0)
    plain = AceStepTransformer1DModel(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1
    ).requires_grad_(False)
    lean = copy.deepcopy(plain)
    use_lean_blocks(lean)
    kept = {}
    for name, block in (("plain", plain.layers[0]), ("lean", lean.layers[0])):
        x = torch.randn(1, 10, 32, requires_grad=True)
        sizes: dict[tuple[int, ...], int] = {}

        def pack(tensor: Tensor, sizes: dict[tuple[int, ...], int] = sizes) -> Tensor:
            if tensor.shape[:2] == (1, 10) and tensor.shape[2] > 1:
                sizes[tensor.data_ptr(), tensor.dtype.itemsize * tensor.numel()] = 1  # kept twice it takes no more
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu"):
            block.mlp(block.mlp_norm(x.bfloat16()).bfloat16())
        kept[name] = sum(size for _, size in sizes)
    of_hidden, of_gate = 10 * 32, 10 * 48
    assert kept == {"plain": 6 * of_hidden + 6 * of_gate, "lean": 2 * of_hidden + 4 * of_gate}
