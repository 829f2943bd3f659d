"""RMS norms with a frozen weight, of queries and keys also turned, in a third of the usual passes over memory."""

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import Function


def rms_norm(x: Tensor, weight: Tensor, eps: float, rotary: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """x [..., D], normalised, in fp32 whatever it is in; the frozen `weight` [D] gets no gradient.

    With `rotary`, the cosines and sines of their positions, [N, D] each, heads [B, N, H, D] are also turned.
    """
    assert not weight.requires_grad
    cosine, sine = (None, None) if rotary is None else rotary
    return cast(Tensor, RMSNormAndRotation.apply(x, weight, eps, cosine, sine))  # type: ignore[no-untyped-call]


class RMSNormAndRotation(Function):
    """y = R (w * x * r), with x a head, r = 1 / sqrt(mean(x^2) + eps), w the weight and R the rotation.

    The gradient of x is r h - x r^3 mean(h x), where h = w * R^T (the gradient of y).
    """

    @staticmethod
    def forward(
        ctx: Any, heads: Tensor, weight: Tensor, eps: float, cosine: Tensor | None, sine: Tensor | None
    ) -> Tensor:
        x = heads.float()
        r: Tensor = torch.linalg.vector_norm(x, dim=-1, keepdim=True).square_().div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(heads, r, weight, cosine, sine)
        normal: Tensor = x * r
        if cosine is None or sine is None:
            return normal.mul_(weight)
        own, to_second, to_first = _factors(weight, cosine, sine)
        turned: Tensor = normal * own
        turned[..., : turned.shape[-1] // 2].addcmul_(normal.chunk(2, -1)[1], to_first)
        turned[..., turned.shape[-1] // 2 :].addcmul_(normal.chunk(2, -1)[0], to_second)
        return turned

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        heads, r, weight, cosine, sine = ctx.saved_tensors
        x = heads.float()
        if cosine is None:
            h = gradient * weight
        else:
            own, to_second, to_first = _factors(weight, cosine, sine)
            h = gradient * own
            h[..., : h.shape[-1] // 2].addcmul_(gradient.chunk(2, -1)[1], to_second)
            h[..., h.shape[-1] // 2 :].addcmul_(gradient.chunk(2, -1)[0], to_first)
        along = torch.linalg.vecdot(h, x).unsqueeze(-1).mul_(r**3).div_(-x.shape[-1])
        return h.mul_(r).addcmul_(x, along).to(heads.dtype), None, None, None, None


def _factors(weight: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """By what a normal head is weighted and turned, [N, 1, D] and twice [N, 1, D / 2].

    The first is for the head itself, the second takes its first half into the second, the third its second half into
    the first: the tables hold each angle twice, once for either half.
    """
    (weight_1, weight_2), (sine_1, sine_2) = weight.float().chunk(2), sine.float().chunk(2, -1)
    return (cosine.float() * weight)[:, None], (sine_2 * weight_1)[:, None], (sine_1 * weight_2).neg()[:, None]
