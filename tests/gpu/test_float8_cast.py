"""Casts to float8 as they are compiled: bit by bit those of PyTorch."""

import pytest
import torch

from llmtrain.kernels.float8_cast import reference
from llmtrain.kernels.float8_cast.triton import float8_cast, float8_transpose
from llmtrain.kernels.platform import detect, float8_refusal

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or detect().vendor != "nvidia" or float8_refusal(detect()) is not None,
    reason="a GPU of NVIDIA with float8 units",
)


def bits(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.view(torch.uint8) for t in tensors]


@pytest.mark.parametrize("shape", [(16, 16), (37, 50), (1000, 4100), (8192, 12288)])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_both_orders_are_those_of_the_reference(shape, dtype):
    x = torch.randn(shape, device="cuda") * torch.rand(shape[1], device="cuda")
    x = x.to(torch.bfloat16)
    scale = torch.finfo(dtype).max / x.abs().max().float()
    found, expected = float8_cast(x, scale, dtype), reference.float8_cast(x, scale, dtype)
    for a, b in zip(bits(*found), bits(*expected), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(*bits(float8_transpose(found[0], found[0]), found[1]))


def test_a_nan_makes_the_scale_one():
    """So that a product is NaN, whatever the kernel makes of the number itself."""
    x = torch.ones(64, 64, device="cuda", dtype=torch.bfloat16)
    x[3, 5] = torch.nan
    scale = torch.finfo(torch.float8_e4m3fn).max / x.abs().max().float()
    rows, _ = float8_cast(x, scale, torch.float8_e4m3fn)
    assert scale.isnan() and (rows.float() / scale).isnan().all()


def test_fp32_is_refused():
    with pytest.raises(AssertionError, match="fp32"):
        float8_cast(torch.ones(64, 64, device="cuda"), torch.ones((), device="cuda"), torch.float8_e4m3fn)
