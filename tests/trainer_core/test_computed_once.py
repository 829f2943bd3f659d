"""What is computed once is what was computed each time."""

import pytest
import torch
from diffusers import AceStepTransformer1DModel
from diffusers.models.transformers import ace_step_transformer
from torch import Tensor

from trainer_core import adapter
from trainer_core.computed_once import ConstantTime, compute_once
from trainer_core.config import AdapterConfig

CPU = torch.device("cpu")


@pytest.fixture
def transformer(monkeypatch: pytest.MonkeyPatch) -> AceStepTransformer1DModel:
    original = ace_step_transformer._ace_step_rotary_freqs
    monkeypatch.setattr(ace_step_transformer, "_ace_step_rotary_freqs", getattr(original, "__wrapped__", original))
    torch.manual_seed(0)
    model = AceStepTransformer1DModel(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1
    )
    return model.requires_grad_(False)


def predict(transformer: AceStepTransformer1DModel, frames: int) -> Tensor:
    torch.manual_seed(frames)
    times = torch.rand(3)
    prediction: Tensor = transformer(
        hidden_states=torch.randn(3, frames, 64),
        timestep=times,
        timestep_r=times,
        encoder_hidden_states=torch.randn(3, 5, 32),
        context_latents=torch.randn(3, frames, 128),
        return_dict=False,
    )[0]
    return prediction


def test_tables_are_made_once_a_length_and_the_second_time_never_again(transformer: AceStepTransformer1DModel) -> None:
    wanted = {frames: predict(transformer, frames) for frames in (20, 31)}
    weights = sum(parameter.numel() for parameter in transformer.parameters())
    of_second_time = sum(parameter.numel() for parameter in transformer.time_embed_r.parameters())
    compute_once(transformer, CPU)
    compute_once(transformer, CPU)
    for _ in range(3):
        for frames, prediction in wanted.items():
            assert torch.allclose(predict(transformer, frames), prediction, atol=1e-6)  # a batch rounds otherwise
    counts = ace_step_transformer._ace_step_rotary_freqs.cache_info()
    assert (counts.misses, counts.hits) == (2, 4)
    assert sum(parameter.numel() for parameter in transformer.parameters()) == weights - of_second_time


def test_under_autocast_the_second_time_is_rounded_as_before(transformer: AceStepTransformer1DModel) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        wanted = predict(transformer, 20)
        compute_once(transformer, CPU)
        assert torch.allclose(predict(transformer, 20), wanted, atol=2e-2)


def test_an_adapted_second_time_stays(transformer: AceStepTransformer1DModel) -> None:
    adapter.inject(transformer, AdapterConfig(rank=4, targets=["time_embed_r.linear_1"]))
    compute_once(transformer, CPU)
    assert not isinstance(transformer.time_embed_r, ConstantTime)
    assert len(list(adapter.trainable(transformer))) == 2
