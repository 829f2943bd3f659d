"""ACE-Step's attention for training: its sliding windows computed as bands, in place of full attention with a mask.

Every other layer of the transformer sees no further than a window to each side. Here the tokens of such a layer are cut
into blocks of one window, and each block attends to itself and its two neighbours: time and memory grow with the
length, not with its square. What is learned is the same; outputs and gradients equal those with the dense mask within
1e-5 in fp32 and 2 % of the largest value in bf16, whose own steps are 0.8 %.
"""

from typing import Any, cast

import torch
import torch.nn.functional as F
from diffusers import AceStepTransformer1DModel
from diffusers.models.attention_dispatch import AttentionBackendName
from diffusers.models.transformers.ace_step_transformer import AceStepAttention
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx

MASKS_KEPT = 8
"""Lengths whose masks are kept. One takes 1.5 kB a token in fp32: 12 MB for ten minutes of music."""


class TrainingAttention:
    """The attention processor of every layer: windowed, full and cross attention."""

    _attention_backend = AttentionBackendName.FLASH
    """By this the transformer knows that windows are seen to here, and builds no dense mask."""
    _parallel_config = None

    def __init__(self) -> None:
        self._masks: dict[tuple[Any, ...], Tensor] = {}

    def __call__(
        self,
        attn: AceStepAttention,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        image_rotary_emb: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """Attention over [B, N, width]; over the [B, L, width] of `encoder_hidden_states` in a cross-attention layer."""
        assert attention_mask is None, "windows come from the layer, and no sample is padded"
        source = hidden_states
        if attn.is_cross_attention and encoder_hidden_states is not None:
            source, image_rotary_emb = encoder_hidden_states, None
        query = attn.to_q(hidden_states).unflatten(-1, (attn.heads, attn.head_dim))
        key = attn.to_k(source).unflatten(-1, (attn.kv_heads, attn.head_dim))
        value = attn.to_v(source).unflatten(-1, (attn.kv_heads, attn.head_dim))
        query = normalize_and_rotate(query, attn.norm_q.weight, attn.norm_q.eps, image_rotary_emb)
        key = normalize_and_rotate(key, attn.norm_k.weight, attn.norm_k.eps, image_rotary_emb)

        options = {"dropout_p": attn.dropout if attn.training else 0.0, "scale": attn.scaling}
        window = attn.sliding_window
        if window is None or query.shape[1] <= window + 1:  # then every token sees every other
            attended = attend(query, key, value, None, **options)
        else:
            attended = self._attend_within(window, query, key, value, **options)
        output: Tensor = attn.to_out[1](attn.to_out[0](attended.flatten(2)))
        return output

    def _attend_within(self, window: int, query: Tensor, key: Tensor, value: Tensor, **options: float) -> Tensor:
        batch, length, heads, width = query.shape
        blocks = -(-length // window)
        mask = self._mask(batch, length, window, query)
        missing = blocks * window - length
        query = F.pad(query, (0, 0, 0, 0, 0, missing)).view(batch * blocks, window, heads, width)

        def with_neighbours(tensor: Tensor) -> Tensor:
            padded = F.pad(tensor, (0, 0, 0, 0, window, window + missing)).unflatten(1, (blocks + 2, window))
            return torch.cat([padded[:, :-2], padded[:, 1:-1], padded[:, 2:]], dim=2).flatten(0, 1)

        attended = attend(query, with_neighbours(key), with_neighbours(value), mask, **options)
        return attended.reshape(batch, blocks * window, heads, width)[:, :length]

    def _mask(self, batch: int, length: int, window: int, like: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # a graph makes it as it goes, for any length
            return band_mask(batch, length, window, like)
        dtype = torch.get_autocast_dtype(like.device.type) if torch.is_autocast_enabled(like.device.type) else like.dtype
        place = (batch, length, window, dtype, like.device)
        if place not in self._masks:
            if len(self._masks) >= MASKS_KEPT:
                del self._masks[next(iter(self._masks))]
            self._masks[place] = band_mask(batch, length, window, like.to(dtype))
        return self._masks[place]


def use_training_attention(transformer: AceStepTransformer1DModel) -> None:
    """Make every attention layer of `transformer` compute with TrainingAttention."""
    transformer.set_attn_processor(TrainingAttention())


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, scale: float) -> Tensor:
    """Scaled dot-product attention of query [B, N, H, D] over key and value [B, M, G, D]; each G serves H / G heads."""
    groups = query.shape[2] // key.shape[2]
    if mask is not None and groups > 1 and query.device.type != "cpu":
        # The one fused kernel of CUDA that takes a mask wants a key for each head; without it all scores are kept.
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        dropout_p=dropout_p,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)


def band_mask(batch: int, length: int, window: int, like: Tensor) -> Tensor:
    """What each block adds to its scores, [batch * blocks, 1, window, 3 * window]: 0 to see a key, the least not to.

    A query in the padding behind `length` sees its neighbours there, so that no row is empty.
    """
    blocks = -(-length // window)
    queries = torch.arange(blocks * window, device=like.device).view(blocks, window, 1)
    keys = (torch.arange(blocks, device=like.device)[:, None, None] - 1) * window
    keys = keys + torch.arange(3 * window, device=like.device)
    is_seen = ((queries - keys).abs() <= window) & (keys >= 0) & ((keys < length) | (queries >= length))
    mask = torch.zeros(is_seen.shape, dtype=like.dtype, device=like.device)
    return mask.masked_fill_(~is_seen, torch.finfo(like.dtype).min)[:, None].repeat(batch, 1, 1, 1)


def normalize_and_rotate(tensor: Tensor, weight: Tensor, eps: float, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
    """RMS-normalise the heads of [B, N, H, D] and turn them by their positions' `rotary` cosines and sines, [N, D]."""
    assert not weight.requires_grad
    cosine, sine = (None, None) if rotary is None else rotary
    return cast(Tensor, NormalizeAndRotate.apply(tensor.float(), weight.float(), eps, cosine, sine))


class NormalizeAndRotate(Function):
    """Both in one, with a third of the passes over memory that the separate operations take.

    With x the head, r = 1 / sqrt(mean(x^2) + eps), w the weight and R the rotation: y = R (w * x * r). The gradient of
    x is r g - x r^3 mean(g x) with g = w * R^T (gradient of y).
    """

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, weight: Tensor, eps: float, cosine: Tensor | None, sine: Tensor | None
    ) -> Tensor:
        r = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, r, weight, cosine, sine)
        normal = x * r
        if cosine is None or sine is None:
            return normal.mul_(weight)
        own, first, second = tables(weight, cosine, sine)
        rotated = normal * own
        (normal_1, normal_2), (rotated_1, rotated_2) = normal.chunk(2, -1), rotated.chunk(2, -1)
        rotated_1.addcmul_(normal_2, first, value=-1)
        rotated_2.addcmul_(normal_1, second)
        return rotated

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, r, weight, cosine, sine = ctx.saved_tensors
        if cosine is None:
            of_normal = gradient * weight
        else:
            own, first, second = tables(weight, cosine, sine)
            of_normal = gradient * own
            (gradient_1, gradient_2), (normal_1, normal_2) = gradient.chunk(2, -1), of_normal.chunk(2, -1)
            normal_1.addcmul_(gradient_2, second)
            normal_2.addcmul_(gradient_1, first, value=-1)
        along = torch.linalg.vecdot(of_normal, x).unsqueeze(-1).mul_(r**3).div_(x.shape[-1])
        return of_normal.mul_(r).addcmul_(x, along, value=-1), None, None, None, None


def tables(weight: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """What a normal head is multiplied by to be weighted and turned, for positions [N, 1, ...].

    The whole head by the first; the second half by the second, taken from the first half; the first half by the third,
    added to the second half.
    """
    (weight_1, weight_2), (sine_1, sine_2) = weight.chunk(2), sine.float().chunk(2, -1)
    return (cosine.float() * weight)[:, None], (sine_1 * weight_2)[:, None], (sine_2 * weight_1)[:, None]
