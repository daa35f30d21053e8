"""Rows of a matrix in registers, in parts, so that a size between two powers of two wastes little: what norms share."""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportOptionalMemberAccess=false
# pyright: reportAttributeAccessIssue=false, reportOperatorIssue=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def part(base, row, stride, tokens, size, p: tl.constexpr, COLUMNS: tl.constexpr, AGAIN: tl.constexpr):
    """Part p of some rows, [rows, columns]; zeros outside. AGAIN: a second time, from the L1 cache; `.ca` keeps the compiler
    from merging both reads.
    """
    column = p * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    at, inside = base + row.to(tl.int64)[:, None] * stride + column, (row < tokens)[:, None] & (column < size)
    if AGAIN:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".ca")
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def parts(base, row, stride, tokens, size, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """All parts of some rows."""
    found = ()
    for p in tl.static_range(PARTS):
        found = found + (part(base, row, stride, tokens, size, p, COLUMNS, False),)
    return found


@triton.jit
def vector(base, size, PARTS: tl.constexpr, COLUMNS: tl.constexpr):
    """One row in fp32, a weight: parts of [1, columns]."""
    found = ()
    for p in tl.static_range(PARTS):
        column = p * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        found = found + (tl.load(base + column, mask=column < size, other=0.0).to(tl.float32),)
    return found
