"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.weight_only import reference
from llmtrain.kernels.weight_only.triton import FEW_ROWS, LARGE, MORE_ROWS, ONE_ROW, tile_and_splits, weight_only_linear

FORMATS = [torch.int8, torch.float8_e4m3fn]
# Products of whole tiles and of parts, of one tile and of several; the last two of programs that share columns, at 64 and at any
# number of rows.
SIZES = [
    *((1, 1), (12, 40), (ONE_ROW.outputs * 2, ONE_ROW.inputs), (FEW_ROWS.outputs + 6, FEW_ROWS.inputs * 2 + 24)),
    *((FEW_ROWS.outputs + 6, 3 * MORE_ROWS.least + 24), (70, 2 * FEW_ROWS.least + 24)),
]


def drawn(
    rows: tuple[int, ...], size: tuple[int, int], kind: torch.dtype, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Activations, codes up to the format's largest number, and scales of very different sizes."""
    (d_out, d_in), g = size, torch.Generator().manual_seed(size[1])
    codes = torch.randint(-127, 128, (d_out, d_in), generator=g, dtype=torch.int8)
    codes[:, 0], codes[:, -1] = -127, 127
    codes = codes if kind == torch.int8 else (codes.float() * (448 / 127)).to(kind)
    return torch.randn(*rows, d_in, generator=g).to(dtype), codes, torch.logspace(-9, 3, d_out)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("rows", [(1,), (1, 1), (2,), (3, 7), (64,)])
@pytest.mark.parametrize("kind", FORMATS)
def test_the_product_is_that_of_the_reference(kind, rows, size):
    x, codes, scales = drawn(rows, size, kind)
    found = weight_only_linear(x, codes, scales)
    expected = reference.weight_only_linear(x.double(), codes, scales.double())
    assert found.shape == expected.shape and found.dtype == x.dtype
    magnitude = x.double().abs() @ (codes.double().abs() * scales.double()[:, None]).T
    assert bool(((found.double() - expected).abs() <= 1e-6 * magnitude).all())


@pytest.mark.parametrize("kind", FORMATS)
def test_a_large_weight(kind):
    size = (1030, 8192 + 24)
    assert tile_and_splits(17, *size) == (LARGE, 8)
    x, codes, scales = drawn((17,), size, kind)
    expected = reference.weight_only_linear(x.double(), codes, scales.double())
    magnitude = x.double().abs() @ (codes.double().abs() * scales.double()[:, None]).T
    assert bool(((weight_only_linear(x, codes, scales).double() - expected).abs() <= 1e-6 * magnitude).all())


@pytest.mark.parametrize(
    ("rows", "d_out", "d_in", "divided"),
    [
        *((16, 3072, 2048, (FEW_ROWS, 1)), (16, 16384, 2048, (FEW_ROWS, 1)), (16, 2048, 8192, (FEW_ROWS, 4))),
        *((64, 3072, 2048, (MORE_ROWS, 4)), (32, 2048, 2048, (MORE_ROWS, 4)), (64, 2048, 500, (MORE_ROWS, 1))),
        *((64, 16384, 2048, (LARGE, 1)), (32, 2048, 8192, (LARGE, 8)), (17, 1 << 18, 8192, (LARGE, 1))),
    ],
)
def test_columns_are_divided_where_there_are_few_tiles(rows, d_out, d_in, divided):
    """The fastest measured for Llama-3.2-1B's products, or within 5 % of it."""
    assert tile_and_splits(rows, d_out, d_in) == divided


@pytest.mark.parametrize("rows", [1, 5])
@pytest.mark.parametrize("kind", FORMATS)
def test_sums_beyond_the_range_of_fp16_are_scaled_before_they_are_rounded(kind, rows):
    x, codes, scales = drawn((rows,), (12, 600), kind, torch.float16)
    codes = codes.float().abs().to(kind)
    x, scales = x.abs() * 8, torch.full_like(scales, 1e-4)
    assert float((x.float() @ codes.float().T).max()) > 65504
    found = weight_only_linear(x, codes, scales)
    torch.testing.assert_close(found, reference.weight_only_linear(x, codes, scales), rtol=3e-3, atol=1e-3)


@pytest.mark.parametrize("rows", [1, 4])
def test_rows_that_lie_apart(rows):
    x, codes, scales = drawn((rows,), (12, 80), torch.int8)
    apart = torch.stack((x, x + 1), dim=1)[:, 0]
    assert rows == 1 or not apart.is_contiguous()
    assert torch.equal(weight_only_linear(apart, codes, scales), weight_only_linear(x, codes, scales))


@pytest.mark.parametrize("d_in", [200, 2 * FEW_ROWS.least])
def test_a_row_does_not_depend_on_the_others(d_in):
    x, codes, scales = drawn((8,), (70, d_in), torch.int8)
    other = x.clone()
    other[[0, 1, 2, 4, 5, 6, 7]] = torch.inf
    assert torch.equal(weight_only_linear(x, codes, scales)[3], weight_only_linear(other, codes, scales)[3])


def test_no_rows():
    x, codes, scales = drawn((0,), (12, 40), torch.int8)
    assert weight_only_linear(x, codes, scales).shape == (0, 12)


def test_the_operator_is_whole():
    checks = ("test_autograd_registration", "test_faketensor")  # test_schema cannot multiply float8
    for kind in FORMATS:
        torch.library.opcheck(weight_only_linear, drawn((3,), (12, 40), kind), test_utils=checks)
