"""What is the same in every step of a run, computed once: the rotary tables of a length, and the second time's part.

ACE-Step's transformer embeds the time t and the difference t - r to a second one, which training keeps at 0.
"""

from functools import lru_cache

import torch
from diffusers import AceStepTransformer1DModel
from diffusers.models.transformers import ace_step_transformer
from torch import Tensor, nn

TABLES_KEPT = 8
"""Lengths whose rotary tables are kept. One takes 1 kB a token: 8 MB for ten minutes of music."""


class ConstantTime(nn.Module):
    """An embedding of the time 0, in place of the layers that make it."""

    embedded: Tensor
    projected: Tensor

    def __init__(self, embedding: nn.Module, device: torch.device) -> None:
        super().__init__()
        with torch.no_grad():
            embedded, projected = embedding(torch.zeros(1, device=device))
        self.register_buffer("embedded", embedded, persistent=False)
        self.register_buffer("projected", projected, persistent=False)

    def forward(self, time: Tensor) -> tuple[Tensor, Tensor]:
        """The embedding [1, width] and its projection [1, 6, width], whatever the batch of `time`."""
        return self.embedded, self.projected


def compute_once(transformer: AceStepTransformer1DModel, device: torch.device) -> None:
    """Keep what doesn't change in `transformer`, on `device`, under the autocast there is.

    The second time's layers go, and with them a hundredth of the weights, unless an adapter is on them.
    """
    tables = getattr(ace_step_transformer, "_ace_step_rotary_freqs", None)
    if tables and not hasattr(tables, "cache_info"):  # diffusers has no other way to keep them
        ace_step_transformer._ace_step_rotary_freqs = lru_cache(maxsize=TABLES_KEPT)(tables)
    if not any(parameter.requires_grad for parameter in transformer.time_embed_r.parameters()):
        transformer.time_embed_r = ConstantTime(transformer.time_embed_r, device)
