"""Linear layers that are not trained: they hold their weight as asked and compute in the precision of their input.

A weight that is held otherwise is made anew each time it is used, forwards and backwards, and let go after: autograd
keeps none. That is one pass over the weight for each product with it, little beside the product itself for a clip of
some seconds. So autocast makes no second copy of the model, and a processor without bf16 units computes in fp32, a
hundred times as fast as in bf16, with a base of half the size.
"""

from typing import Any, cast

import torch
from diffusers import AceStepTransformer1DModel
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx

from trainer_core.config import QUANTIZED, BaseDtype
from trainer_core.precision import computing_dtype
from trainer_core.products import product

BLOCKS = "layers."
"""Where the transformer's blocks are, which hold nearly all of its weights; only those are quantised."""


class FrozenLinear(nn.Linear):
    """A linear layer that holds its weight in the dtype it was made with, and its bias in fp32."""

    def hold(self, weight: Tensor) -> None:
        """Take `weight`, [out, in], where it is; without a copy if it has that dtype."""
        self.weight = nn.Parameter(weight.to(self.weight.dtype), requires_grad=False)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight in `dtype`."""
        return self.weight.to(dtype)

    def forward(self, input: Tensor) -> Tensor:
        """The product in the dtype of `input`, or in that of autocast."""
        return cast(Tensor, _Product.apply(input.to(computing_dtype(input)), self))  # type: ignore[no-untyped-call]


class QuantizedLinear(FrozenLinear):
    """A linear layer that holds its weight in 8 or 4 bits, by the package bitsandbytes."""

    def __init__(self, plain: nn.Linear, base_dtype: BaseDtype) -> None:
        nn.Module.__init__(self)  # not that of nn.Linear, which would make a weight
        self.in_features, self.out_features, self.bias = plain.in_features, plain.out_features, plain.bias
        self.base_dtype = base_dtype

    def hold(self, weight: Tensor) -> None:
        """Quantise `weight` on the device where it is."""
        from bitsandbytes import functional as bitsandbytes

        weight = weight.bfloat16()
        if self.base_dtype == "int8":  # each output has a scale
            self.packed, self.scale, _ = bitsandbytes.int8_vectorwise_quant(weight.half())
        else:  # each 64 values have a scale, which is kept in 8 bits itself
            self.packed, self.scale = bitsandbytes.quantize_4bit(
                weight.contiguous(), quant_type="nf4", compress_statistics=True
            )

    def dense(self, dtype: torch.dtype) -> Tensor:
        """The weight, rounded as it is held, in `dtype`."""
        from bitsandbytes import functional as bitsandbytes

        is_int8 = self.base_dtype == "int8"
        unpack: Any = bitsandbytes.int8_vectorwise_dequant if is_int8 else bitsandbytes.dequantize_4bit
        return cast(Tensor, unpack(self.packed, self.scale)).to(dtype)

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight in fp32, for PEFT, which looks at it when it adds an adapter and for the norms of a DoRA."""
        return self.dense(torch.float32)


class _Product(torch.autograd.Function):
    """`input` times the weight of a frozen layer, with a gradient for `input` alone."""

    @staticmethod
    def forward(ctx: FunctionCtx, input: Tensor, layer: FrozenLinear) -> Tensor:
        ctx.layer = layer  # type: ignore[attr-defined]
        bias = None if layer.bias is None else layer.bias.to(input.dtype)
        return product(input, layer.dense(input.dtype), bias)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return product(gradient, ctx.layer.dense(gradient.dtype).T), None


def use_frozen_layers(transformer: AceStepTransformer1DModel, base_dtype: BaseDtype) -> None:
    """Make the linear layers of a transformer on the meta device ones that hold their weights as `base_dtype` says."""
    dtype = torch.float32 if base_dtype in ("auto", "fp32") else torch.bfloat16
    for name, plain in list(transformer.named_modules()):
        if isinstance(plain, nn.Linear):
            if base_dtype in QUANTIZED and name.startswith(BLOCKS):
                frozen: FrozenLinear = QuantizedLinear(plain, base_dtype)
            else:
                frozen = FrozenLinear(plain.in_features, plain.out_features, plain.bias is not None, "meta", dtype)
            parent, _, own = name.rpartition(".")
            setattr(transformer.get_submodule(parent), own, frozen)
