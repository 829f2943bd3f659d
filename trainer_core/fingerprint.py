"""A short name for the contents of many tensors, to notice when a run is resumed on others."""

from collections.abc import Iterable
from hashlib import blake2b

import torch
from torch import Tensor

SAMPLED = 1024
"""Values looked at in each tensor: all of a 2B model would take half a minute, and any training changes nearly all."""


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits from names, shapes and evenly spread values, rounded to bf16 as a base model may be kept."""
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        flat = tensor.detach().flatten()
        spread = flat[:: max(1, flat.numel() // SAMPLED)].to("cpu", torch.bfloat16)
        digest.update(f"{name} {list(tensor.shape)} ".encode())
        digest.update(spread.view(torch.int16).numpy().tobytes())
    return digest.hexdigest()
