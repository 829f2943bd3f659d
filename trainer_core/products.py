"""Products of activations and weights, by the fastest of the libraries that PyTorch comes with.

PyTorch gives products in fp32 on the CPU to MKL, whose kernels for AVX-512 are for Intel's processors only. On AMD's
those of oneDNN, which PyTorch has beside it, take a tenth less time, and a third less where the output is wide.
"""

import platform
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [..., in] times the transpose of `weight` [out, in], plus `bias` [out]. Autograd does not see it."""
    is_plain = x.device.type == "cpu" and x.dtype == torch.float32 and not torch.compiler.is_compiling()
    if is_plain and x.numel() and prefers_onednn():
        # The operator that compiled models use. PyTorch keeps it for itself, but has had it so since 2.0.
        return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")  # type: ignore[no-any-return]
    return F.linear(x, weight, bias)


@cache
def prefers_onednn() -> bool:
    """Whether oneDNN's products are at hand and this is a processor of AMD.

    By its maker, not by a measurement: a run that is continued has to compute as it did before.
    """
    described = Path("/proc/cpuinfo")
    maker = described.read_text() if described.exists() else platform.processor()
    return "AuthenticAMD" in maker and hasattr(torch.ops.mkldnn, "_linear_pointwise")
