"""Casts to float8 in Triton: one read of a matrix, of which a float8 product wants the rows and another the columns.

The matrix units of Hopper take float8 operands with the summed dimension contiguous alone. A linear layer sums its input over
channels in the forward pass and over tokens for the weight's gradient, so the input is needed in both orders, as is the output's
gradient. Each program casts a tile and writes it twice, in lines of at least 64 bytes.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.operators import operator

BLOCK_ROWS, BLOCK_COLUMNS, NUM_WARPS = 128, 128, 8


def launch_cast(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The reference's results, by one kernel. Products have inputs in bf16: on a GPU fp32 is refused, of whose tiles Triton 3.6
    writes a wrong transpose where both sizes are multiples of 16 (seen on an H100)."""
    assert x.dtype != torch.float32 or not x.is_cuda, "a cast from fp32 is not right on GPUs"
    x = x.contiguous()
    rows, columns = x.shape
    result, transposed = x.new_empty((rows, columns), dtype=dtype), x.new_empty((columns, rows), dtype=dtype)
    _cast[cdiv(columns, BLOCK_COLUMNS), cdiv(rows, BLOCK_ROWS)](
        *(x, scale, result, transposed, rows, columns),
        LARGEST=torch.finfo(dtype).max,
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return result, transposed


def launch_transpose(x: Tensor, after: Tensor) -> Tensor:
    """The reference's result, by one kernel.

    after: a tensor that must be there before. One of a gradient keeps a weight's transposition in the backward pass: the compiler
    else moves it to the forward pass, and keeps what it makes.
    """
    x = x.contiguous()
    rows, columns = x.shape
    transposed = x.new_empty((columns, rows))
    _transpose[cdiv(columns, BLOCK_COLUMNS), cdiv(rows, BLOCK_ROWS)](
        *(x.view(torch.int8), transposed.view(torch.int8), rows, columns),
        BLOCK_ROWS=BLOCK_ROWS,
        BLOCK_COLUMNS=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return transposed


float8_cast = operator("float8_cast", launch_cast, replayed=True)
float8_transpose = operator("float8_transpose", launch_transpose, replayed=True)


@torch.library.register_fake(float8_cast)
def _(x, scale, dtype):
    rows, columns = x.shape
    return x.new_empty((rows, columns), dtype=dtype), x.new_empty((columns, rows), dtype=dtype)


@torch.library.register_fake(float8_transpose)
def _(x, after):
    rows, columns = x.shape
    return x.new_empty((columns, rows))


@jit
def _cast(
    x, scale, result, transposed, rows, columns,
    LARGEST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile of columns, tile of rows)."""
    row = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = row[:, None] * columns + column[None, :]
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    # A NaN in x may be clamped here; it has made the scale NaN, and that makes the product NaN.
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(result.dtype.element_ty)
    tl.store(result + at, value, mask=inside)
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(inside))


@jit
def _transpose(x, transposed, rows, columns, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """Program (tile of columns, tile of rows), of bytes."""
    row = (tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)
    column = (tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    value = tl.load(x + row[:, None] * columns + column[None, :], mask=inside, other=0)
    tl.store(transposed + column[:, None] * rows + row[None, :], tl.trans(value), mask=tl.trans(inside))
