"""A block's norms and MLP as ACE-Step computes them, in fewer passes over memory and keeping less for the way back.

Autograd keeps of an MLP its gate before and after the activation, and under autocast of a norm its input twice; here
it keeps one of each, and makes the other anew.
"""

from typing import Any, cast

import torch
from diffusers import AceStepTransformer1DModel
from diffusers.models.normalization import RMSNorm
from diffusers.models.transformers.ace_step_transformer import AceStepMLP
from torch import Tensor
from torch.autograd import Function
from torch.nn.functional import silu

from trainer_core.rms_norm import rms_norm


class LeanNorm(RMSNorm):  # type: ignore[misc]
    """diffusers' RMS norm with a frozen weight."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        """`hidden_states` [..., width], normalised, in fp32."""
        return rms_norm(hidden_states, self.weight, self.eps)


class LeanMLP(AceStepMLP):  # type: ignore[misc]
    """ACE-Step's MLP."""

    def forward(self, x: Tensor) -> Tensor:
        """The MLP's output for `x` [..., width], of the same shape."""
        gated = SwiGLU.apply(self.gate_proj(x), self.up_proj(x))  # type: ignore[no-untyped-call]
        return cast(Tensor, self.down_proj(gated))


class SwiGLU(Function):
    """silu(gate) * up, of two tensors of one shape and dtype."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        of_gate = torch.ops.aten.silu_backward(gradient * up, gate)
        return of_gate, silu(gate).mul_(gradient)


def use_lean_blocks(transformer: AceStepTransformer1DModel) -> None:
    """Make the norms and MLPs of `transformer` compute so. Weights, and names with them, stay."""
    for module in transformer.modules():
        if type(module) is RMSNorm:
            module.__class__ = LeanNorm
        elif type(module) is AceStepMLP:
            module.__class__ = LeanMLP
