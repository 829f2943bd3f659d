"""A short name for the contents of many tensors, to notice when a run is resumed on others."""

from collections.abc import Iterable
from hashlib import blake2b
from math import gcd

import torch
from torch import Tensor


def fingerprint(named: Iterable[tuple[str, Tensor]]) -> str:
    """32 hex digits from the names, shapes and bytes of the tensors, in their order."""
    digest = blake2b(digest_size=16)
    for name, tensor in named:
        digest.update(f"{name} {list(tensor.shape)} {tensor.dtype} ".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def spread(tensor: Tensor, most: int = 4096) -> Tensor:
    """About `most` values from all over `tensor`, rounded to bf16, as a base model may be kept.

    Enough to tell base models apart, any training changes nearly all of their weights; all of them would take half a
    minute of a 2B model. The stride has no divisor in common with any dimension, so that no column is left out.
    """
    flat = tensor.detach().flatten()
    stride = max(1, flat.numel() // most)
    while gcd(stride, flat.numel()) > 1:
        stride += 1
    return flat[::stride].bfloat16()
