"""A LoRA layer that multiplies by W + s B A at once, where that rounds as finely as the two apart: in fp32.

PEFT's layer computes x W and s (x A) B and adds them: six thin products and some ten passes over activations that this
one spares. The sum of the weights is made for each product and kept for none, so it takes no memory.
"""

from typing import Any, cast

import torch
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from torch.autograd import Function

from trainer_core.products import product


class MergedLora(lora.Linear):
    """PEFT's layer with one LoRA adapter named default, without dropout or magnitudes, computed as one product."""

    @classmethod
    def take_over(cls, layer: BaseTunerLayer) -> None:
        """Make `layer` compute so, if it is a PEFT layer that can; its parameters and their names stay."""
        if type(layer) is not lora.Linear or layer.lora_variant:
            return
        dropout = dict(layer.lora_dropout.named_children())["default"]
        if not isinstance(dropout, nn.Identity):
            return
        if "weight" in dict(layer.get_base_layer().named_parameters()):  # a quantised layer has none to add to
            layer.__class__ = cls

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What PEFT's layer gives for `x`; under autocast, by PEFT's own way."""
        if torch.is_autocast_enabled(x.device.type) or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)
        base, a, b = self.get_base_layer(), self.lora_A["default"].weight, self.lora_B["default"].weight
        product = MergedProduct.apply(x, base.weight, base.bias, a, b, self.scaling["default"])  # type: ignore[no-untyped-call]
        return cast(Tensor, product)


class MergedProduct(Function):
    """y = x (W + s B A)^T + c. With G the gradient of y: s G^T (x A^T) is that of B, s (G B)^T x that of A."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, s: float) -> Tensor:
        ctx.save_for_backward(x, weight, a, b)
        ctx.s = s
        return product(x, torch.addmm(weight.float(), b, a, alpha=s), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, a, b = ctx.saved_tensors
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = product(gradient, torch.addmm(weight.float(), b, a, alpha=ctx.s).T)
        rows, gradient = x.flatten(0, -2), gradient.flatten(0, -2)
        of_b = (gradient.T @ (rows @ a.T)).mul_(ctx.s)
        of_a = ((gradient @ b).T @ rows).mul_(ctx.s)
        return of_x, None, None, of_a, of_b, None
