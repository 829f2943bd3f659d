"""Blocks of the transformer computed again on the way back, so that what they computed need not be kept meanwhile."""

from typing import Any

import torch.utils.checkpoint
from diffusers import AceStepTransformer1DModel
from torch import nn


def enable(transformer: AceStepTransformer1DModel, blocks: range) -> None:
    """Compute the blocks with these numbers again; gradients and random draws are those without.

    Not reentrant, as diffusers has it by default: so a block needs no input with a gradient.
    """
    if not blocks:
        return
    chosen = {transformer.layers[number] for number in blocks}

    def run(block: nn.Module, *arguments: Any) -> Any:
        if block not in chosen:
            return block(*arguments)
        return torch.utils.checkpoint.checkpoint(block, *arguments, use_reentrant=False)

    transformer.enable_gradient_checkpointing(run)
