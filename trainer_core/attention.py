"""ACE-Step's attention for training: its sliding windows computed as bands, in place of full attention with a mask.

Every other layer of the transformer sees no further than a window to each side. The tokens of such a layer are cut into
blocks of one window here, and each block attends to itself and its two neighbours: time and memory grow with the
length, not with its square. What is learned is the same: outputs and gradients equal those of the dense mask, within
1e-5 of their largest value in fp32 and 2e-2 in bf16, whose own steps are 8e-3.
"""

import time
from collections.abc import Callable
from functools import cache, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from diffusers import AceStepTransformer1DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.ace_step_transformer import AceStepAttention
from torch import Tensor

from trainer_core.precision import computing_dtype
from trainer_core.rms_norm import rms_norm

MASKS_KEPT = 8
"""Lengths whose masks are kept. One takes 1.5 kB a token of a batch in fp32: 12 MB for ten minutes of music."""
TOLERANCE = 2e-2
TIMED_CALLS = 5


WindowAttention = Callable[[Tensor, Tensor, Tensor, int, float], Tensor]
"""Attention of query [B, N, H, D] to the keys and values [B, N, G, D] that are at most a window away, [B, N, H, D].

Takes query, key, value, the window in tokens and what scores are multiplied with.
"""


class TrainingAttention:
    """The attention processor of all layers, windowed, full and cross; the windowed ones compute by `windowed`."""

    _attention_backend = AttentionBackendName.FLASH
    """By this the transformer knows that windows are seen to here, and builds no dense mask."""

    def __init__(self, windowed: WindowAttention) -> None:
        self.windowed = windowed

    def __call__(
        self,
        attn: AceStepAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention of [B, N, width] to itself, or in a cross-attention layer to `encoder_hidden_states` [B, L, width].

        Each sample of a batch has all its tokens: there is no padding to mask.
        """
        assert attention_mask is None
        source = hidden_states
        if encoder_hidden_states is not None:
            source, image_rotary_emb = encoder_hidden_states, None
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, attn.head_dim))
        key = attn.to_k(source).unflatten(-1, (attn.kv_heads, attn.head_dim))
        value = attn.to_v(source).unflatten(-1, (attn.kv_heads, attn.head_dim))
        query = rms_norm(query, attn.norm_q.weight, attn.norm_q.eps, image_rotary_emb)
        key = rms_norm(key, attn.norm_k.weight, attn.norm_k.eps, image_rotary_emb)
        if attn.sliding_window is None or query.shape[1] <= attn.sliding_window + 1:  # every token sees every other
            attended = attend(query, key, value, attn.scaling)
        else:
            attended = self.windowed(query, key, value, attn.sliding_window, attn.scaling)
        output: Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2)))
        return output


def banded(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """WindowAttention by PyTorch's own fused kernels, on any device."""
    batch, length, heads, width = query.shape
    blocks = -(-length // window)
    missing = blocks * window - length

    def with_neighbours(tensor: Tensor) -> Tensor:
        padded = F.pad(tensor, (0, 0, 0, 0, window, window + missing))
        padded = padded.view(batch, blocks + 2, window, *tensor.shape[2:])
        return torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], dim=2).flatten(0, 1)

    # A graph makes its own mask as it goes, for any length.
    make_mask = band_mask.__wrapped__ if torch.compiler.is_compiling() else band_mask
    mask = make_mask(batch, length, window, computing_dtype(query), query.device)
    query = F.pad(query, (0, 0, 0, 0, 0, missing)).view(batch * blocks, window, heads, width)
    attended = attend(query, with_neighbours(key), with_neighbours(value), scale, mask)
    return attended.reshape(batch, blocks * window, heads, width)[:, :length]


def flex(query: Tensor, key: Tensor, value: Tensor, window: int, scale: float) -> Tensor:
    """WindowAttention by FlexAttention, which PyTorch compiles for the card; elsewhere it is slow."""
    mask = flex_mask(query.shape[1], window, query.device)
    heads = [tensor.to(computing_dtype(query)).transpose(1, 2) for tensor in (query, key, value)]
    attended: Tensor = compiled_flex()(*heads, block_mask=mask, scale=scale, enable_gqa=True)
    return attended.transpose(1, 2)


@cache
def compiled_flex() -> Callable[..., Any]:
    """FlexAttention compiled for any length. Imported here, since only cuda uses it."""
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)


@lru_cache(maxsize=MASKS_KEPT)
def flex_mask(length: int, window: int, device: torch.device) -> Any:
    """FlexAttention's own description of which blocks of keys are seen."""
    from torch.nn.attention.flex_attention import create_block_mask

    def is_seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q - k).abs() <= window

    return create_block_mask(is_seen, None, None, length, length, device=device)


def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Attention of query [B, N, H, D] to key and value [B, M, G, D], each of which serves H / G heads."""
    shared = query.shape[2] // key.shape[2]
    if query.device.type == "cuda" and (mask is not None or computing_dtype(query) == torch.float32):
        # CUDA's one fused kernel that takes a mask, or fp32, wants a key for each head; the others keep every score.
        key, value = key.repeat_interleave(shared, dim=2), value.repeat_interleave(shared, dim=2)
        shared = 1
    query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)
    return F.scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=shared > 1
    ).transpose(1, 2)


@lru_cache(maxsize=MASKS_KEPT)
def band_mask(batch: int, length: int, window: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """What each block adds to its scores, [batch * blocks, 1, window, 3 * window]: 0 for a key it sees, else the least.

    The padding behind `length` sees itself, so that no row is without a key.
    """
    blocks = -(-length // window)
    queries = torch.arange(blocks * window, device=device).view(blocks, window, 1)
    keys = queries[:, :1] - window + torch.arange(3 * window, device=device)
    is_seen = ((queries - keys).abs() <= window) & (keys >= 0) & ((keys < length) | (queries >= length))
    mask = torch.zeros(is_seen.shape, dtype=dtype, device=device).masked_fill_(~is_seen, torch.finfo(dtype).min)
    return mask[:, None].repeat(batch, 1, 1, 1)


def use_training_attention(transformer: AceStepTransformer1DModel, windowed: WindowAttention) -> None:
    """Make all attention of `transformer` compute by TrainingAttention, its windows by `windowed`.

    Raises ValueError for a model with dropout in its attention: none of ACE-Step's has it.
    """
    if transformer.config.attention_dropout:
        raise ValueError(f"attention_dropout is {transformer.config.attention_dropout}; ACE-Step's models have 0.")
    transformer.set_attn_processor(TrainingAttention(windowed))


def fastest(transformer: AceStepTransformer1DModel, length: int, device: torch.device) -> WindowAttention:
    """The WindowAttention that is fastest here for `length` tokens, forward and backward, under the autocast there is.

    On CUDA FlexAttention is measured beside `banded`, and taken if it is faster and equal within TOLERANCE; a card or
    system for which it can't be compiled keeps `banded`. Elsewhere it has no fused backward and `banded` is taken
    unseen.
    """
    config = transformer.config
    if device.type != "cuda" or length <= config.sliding_window + 1:
        return banded
    shapes = [(1, length, heads, config.head_dim) for heads in (config.num_attention_heads, config.num_key_value_heads)]
    generator = torch.Generator(device).manual_seed(0)
    query, key, value = (torch.randn(shapes[i], device=device, generator=generator) for i in (0, 1, 1))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    try:
        return flex if is_better(flex, banded, inputs, config.sliding_window) else banded
    except Exception:  # whatever its compiler meets: without it training is as right
        return banded


def is_better(candidate: WindowAttention, known: WindowAttention, inputs: list[Tensor], window: int) -> bool:
    """Whether `candidate` gives what `known` gives for query, key and value, with its gradients, in less time."""
    seconds, results = [], []
    for kernel in (known, candidate):
        results.append(_outputs_and_gradients(kernel, inputs, window))
        began = time.perf_counter()
        for _ in range(TIMED_CALLS):
            _outputs_and_gradients(kernel, inputs, window)
        seconds.append(time.perf_counter() - began)
    is_equal = all(
        (one - other).abs().max() <= TOLERANCE * one.abs().max() for one, other in zip(*results, strict=True)
    )
    return is_equal and seconds[1] < seconds[0]


def _outputs_and_gradients(kernel: WindowAttention, inputs: list[Tensor], window: int) -> list[Tensor]:
    query, key, value = inputs
    output = kernel(query, key, value, window, query.shape[-1] ** -0.5)
    gradients = torch.autograd.grad(output.float().square().mean(), inputs)
    if output.is_cuda:
        torch.cuda.synchronize()
    return [output.detach().float(), *gradients]
