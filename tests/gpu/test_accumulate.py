"""Sums in fp32 of tensors in 16 bits are PyTorch's, bit by bit."""

import pytest
import torch

from llmtrain.kernels.accumulate import accumulate

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(1,), (8192, 2048), (1001, 77)])
def test_a_sum_is_pytorchs(shape, dtype):
    total, part = torch.randn(shape, device="cuda"), torch.randn(shape, device="cuda").to(dtype)
    expected = total + part
    accumulate(total, part)
    assert torch.equal(total, expected)
