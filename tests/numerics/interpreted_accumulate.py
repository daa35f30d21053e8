"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.accumulate import BLOCK, accumulate, launch_accumulate


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2 * BLOCK,), (BLOCK + 1,), (0, 4)])
def test_a_sum_is_pytorchs(shape, dtype):
    g = torch.Generator().manual_seed(1)
    total, part = torch.randn(shape, generator=g), torch.randn(shape, generator=g).to(dtype)
    expected = total + part
    launch_accumulate(total, part)
    assert torch.equal(total, expected)


def test_what_the_kernel_does_not_take_is_added_by_pytorch():
    total, part = torch.ones(4, 6), torch.ones(6, 4, dtype=torch.bfloat16).t()
    accumulate(total, part)
    assert torch.equal(total, torch.full((4, 6), 2.0))
