"""Second half of a sum over tokens whose first half was taken per program, in a fixed order: equal bits in every run."""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit

# A program's tile: few columns, for many programs, and many rows, for many bytes in flight; columns are in fp32, so 32 of them
# fill 128 bytes.
_ROWS, _COLUMNS, _WARPS = 128, 32, 8


def reduce_partials(partials: Tensor, first: Tensor, second: Tensor | None = None, third: Tensor | None = None) -> None:
    """Fill `first`, `second` and `third`, in turn, with the sums of the columns of partials, [rows, columns] in fp32, contiguous.

    They are contiguous, of any dtype and shape; together they have as many elements as there are columns.
    """
    rows, columns = partials.shape
    second_at = first.numel()
    third_at = second_at + (0 if second is None else second.numel())
    assert columns == third_at + (0 if third is None else third.numel())
    assert partials.dtype == torch.float32
    assert all(t is None or t.is_contiguous() for t in (partials, first, second, third))
    _reduce_partials[(cdiv(columns, _COLUMNS),)](
        *(partials, first, second, third, rows, columns, second_at, third_at),
        ROWS=_ROWS,
        COLUMNS=_COLUMNS,
        num_warps=_WARPS,
    )


@jit
def _reduce_partials(
    partials, first, second, third, rows, columns, second_at, third_at, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Program (block of columns)."""
    column, row = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, ROWS)
    total = tl.zeros((ROWS, COLUMNS), tl.float64)  # fp32 would add a rounding per row to those of the partial sums
    for start in tl.range(0, rows, ROWS):
        r = (start + row).to(tl.int64)[:, None]
        inside = (r < rows) & (column < columns)[None, :]
        total += tl.load(partials + r * columns + column[None, :], mask=inside, other=0.0).to(tl.float64)
    found = tl.sum(total, 0)
    tl.store(first + column, found.to(first.dtype.element_ty), mask=column < second_at)
    if second is not None:
        inside = (column >= second_at) & (column < third_at)
        tl.store(second + (column - second_at), found.to(second.dtype.element_ty), mask=inside)
    if third is not None:
        inside = (column >= third_at) & (column < columns)
        tl.store(third + (column - third_at), found.to(third.dtype.element_ty), mask=inside)
