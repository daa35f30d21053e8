"""Device functions of norms: rows of a matrix in registers, in parts, so that sizes between powers of two waste little."""

import triton
import triton.language as tl


@triton.jit
def load_part(base, row, stride, tokens, size, p: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, RELOAD: tl.constexpr):
    """Part p of some rows, [rows, columns]; zeros outside. RELOAD: a second read, from the L1 cache; `.ca` keeps the compiler
    from merging both reads.
    """
    column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
    at, inside = base + row.to(tl.int64)[:, None] * stride + column, (row < tokens)[:, None] & (column < size)
    if RELOAD:
        return tl.load(at, mask=inside, other=0.0, cache_modifier=".ca")
    return tl.load(at, mask=inside, other=0.0)


@triton.jit
def load_parts(base, row, stride, tokens, size, PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """The parts of some rows, as a tuple."""
    found = ()
    for p in tl.static_range(PARTS):
        found = found + (load_part(base, row, stride, tokens, size, p, BLOCK_COLUMNS, False),)
    return found


@triton.jit
def load_vector(base, size, PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """One row in fp32, a weight: parts of [1, columns]."""
    found = ()
    for p in tl.static_range(PARTS):
        column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
        found = found + (tl.load(base + column, mask=column < size, other=0.0).to(tl.float32),)
    return found
