"""Products by either library are the same."""

import platform
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from trainer_core import products
from trainer_core.products import prefers_onednn, product


@pytest.fixture(params=["MKL", "oneDNN"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "oneDNN" and not hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        pytest.skip("this PyTorch comes without oneDNN")
    monkeypatch.setattr(products, "prefers_onednn", lambda: request.param == "oneDNN")
    return str(request.param)


@pytest.mark.parametrize("shape", [(48,), (1, 48), (0, 48), (2, 0, 48), (2, 7, 48), (2, 3, 130, 48)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_product_is_that_of_pytorch(
    library: str, shape: tuple[int, ...], bias: bool, turned: bool, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=generator).to(dtype)
    weight = torch.randn((48, 80) if turned else (80, 48), generator=generator).to(dtype)
    weight = weight.T if turned else weight
    added = torch.randn(80, generator=generator).to(dtype) if bias else None
    for rows in (x, x.repeat(*(1 for _ in x.shape[:-1]), 2)[..., ::2]):  # and one that lies apart in memory
        found, wanted = product(rows, weight, added), F.linear(rows, weight, added)
        assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_onednn_computes_where_it_is_preferred(library: str) -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        product(torch.randn(3, 48), torch.randn(80, 48))
    assert ("mkldnn::_linear_pointwise" in {event.key for event in seen.key_averages()}) == (library == "oneDNN")


@pytest.mark.parametrize(("maker", "is_preferred"), [("AuthenticAMD", True), ("GenuineIntel", False), ("", False)])
def test_onednn_is_preferred_on_processors_of_amd(
    maker: str, is_preferred: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "exists", lambda path: False)
    monkeypatch.setattr(platform, "processor", lambda: f"AMD64 Family 25 Model 97 Stepping 2, {maker}")
    assert prefers_onednn.__wrapped__() == is_preferred
