"""LoRA as one product gives what PEFT's layer gives."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners import lora
from torch import Tensor, nn

from trainer_core.merged_lora import MergedLora


def layer(out: int = 12, **options: Any) -> lora.Linear:
    """PEFT's layer on one of 20 inputs, with weights for both of its matrices."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, out)).requires_grad_(False)
    config = LoraConfig(r=4, lora_alpha=7, target_modules=["0"], init_lora_weights=False, **options)
    inject_adapter_in_model(config, model)
    found = model[0]
    assert isinstance(found, lora.Linear)
    return found


def results(layer: lora.Linear, x: Tensor) -> list[Tensor]:
    parameters = [parameter for parameter in layer.parameters() if parameter.requires_grad]
    assert len(parameters) == 2
    output = layer(x)
    wanted = [*parameters, x] if x.requires_grad else parameters
    return [output, *torch.autograd.grad(output.square().sum(), wanted)]


@pytest.mark.parametrize("shape", [(3, 20), (2, 5, 20)], ids=str)
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("rank_stabilized", [True, False])
def test_one_product_gives_outputs_and_gradients_of_two(
    shape: tuple[int, ...], needs_gradient: bool, rank_stabilized: bool
) -> None:
    plain, merged = layer(use_rslora=rank_stabilized), layer(use_rslora=rank_stabilized)
    MergedLora.take_over(merged)
    assert type(merged) is MergedLora
    assert merged.state_dict().keys() == plain.state_dict().keys()
    x = torch.randn(shape, requires_grad=needs_gradient)
    for found, wanted in zip(results(merged, x), results(plain, x), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_under_autocast_peft_computes_since_bf16_would_round_the_adapter_away() -> None:
    plain, merged = layer(), layer()
    MergedLora.take_over(merged)
    x = torch.randn(3, 20, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        for found, wanted in zip(results(merged, x), results(plain, x), strict=True):
            assert torch.equal(found, wanted)


def test_neither_weights_nor_their_sum_are_kept_for_the_way_back() -> None:
    merged = layer(out=300)
    MergedLora.take_over(merged)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        merged(torch.randn(2, 20))
    own = {tensor.data_ptr() for tensor in merged.parameters()}
    assert sum(tensor.numel() for tensor in kept if tensor.data_ptr() not in own) == 40


@pytest.mark.parametrize("options", [{"lora_dropout": 0.1}, {"use_dora": True}], ids=str)
def test_layers_with_dropout_or_magnitudes_stay_pefts(options: dict[str, Any]) -> None:
    plain = layer(**options)
    MergedLora.take_over(plain)
    assert type(plain) is lora.Linear
