"""Blocks of the transformer computed again on the way back, so that what they computed need not be kept meanwhile."""

from typing import Any

from diffusers import AceStepTransformer1DModel
from torch import nn
from torch.utils.checkpoint import checkpoint


def enable(transformer: AceStepTransformer1DModel, blocks: range) -> None:
    """Compute the blocks with these numbers again; gradients and random draws are those without.

    Not reentrant, as diffusers has it by default: so a block needs no input with a gradient.
    """
    if not blocks:
        return
    chosen = {transformer.layers[number] for number in blocks}

    def run(block: nn.Module, *arguments: Any) -> Any:
        return checkpoint(block, *arguments, use_reentrant=False) if block in chosen else block(*arguments)

    transformer.enable_gradient_checkpointing(run)
