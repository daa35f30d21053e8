"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.float8_cast import reference
from llmtrain.kernels.float8_cast.triton import float8_cast, float8_transpose

FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
SHAPES = [(1, 1), (16, 16), (37, 50), (128, 256), (130, 300)]


def drawn(shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A matrix whose multiples by the scale are numbers of the format: Triton's interpreter loses carries where it rounds. How
    numbers are rounded is for the GPU tests."""
    numbers = (16 * torch.randn(shape, generator=torch.Generator().manual_seed(shape[0]))).to(dtype)
    return numbers.to(torch.bfloat16) / 4, torch.tensor(4.0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_both_orders_are_those_of_the_reference(shape, dtype):
    x, scale = drawn(shape, dtype)
    found, expected = float8_cast(x, scale, dtype), reference.float8_cast(x, scale, dtype)
    for a, b in zip(found, expected, strict=True):
        assert a.is_contiguous() and a.dtype == dtype
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_what_a_format_cannot_hold_becomes_its_largest_number():
    x = torch.tensor([[1.0, -2.0, 0.5, 0.0]])
    rows, _ = float8_cast(x, torch.tensor(1000.0), torch.float8_e4m3fn)
    assert rows.float().tolist() == [[448.0, -448.0, 448.0, 0.0]]


def test_a_matrix_with_gaps_between_its_rows():
    x, scale = drawn((20, 64), FORMATS[0])
    rows, columns = float8_cast(x[:, 16:48], scale, FORMATS[0])
    whole, _ = float8_cast(x, scale, FORMATS[0])
    assert torch.equal(rows.view(torch.uint8), whole.view(torch.uint8)[:, 16:48])
    assert torch.equal(columns.view(torch.uint8), rows.view(torch.uint8).t())


@pytest.mark.parametrize("shape", SHAPES)
def test_transposed(shape):
    x = reference.float8_cast(*drawn(shape, FORMATS[0]), FORMATS[0])[0]
    found = float8_transpose(x, x)
    assert found.dtype == x.dtype and torch.equal(found.view(torch.uint8), x.view(torch.uint8).t())


def test_the_operators_are_whole():
    x, scale = drawn((16, 32), FORMATS[0])
    checks = ("test_autograd_registration", "test_faketensor")  # test_schema cannot multiply float8
    torch.library.opcheck(float8_cast, (x, scale, FORMATS[0]), test_utils=checks)
    torch.library.opcheck(float8_transpose, (float8_cast(x, scale, FORMATS[0])[0], scale), test_utils=checks)
