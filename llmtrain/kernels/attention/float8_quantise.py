"""Operands of attention in float8: blocks of tokens of one head, each with a scale, along channels and along tokens.

Hopper's matrix units take float8 operands with the summed dimension contiguous alone, so what is summed over channels is written
as [tokens, head_dim], and what is summed over tokens as [head_dim, tokens]. The former are rotated: by a Hadamard matrix, which
leaves their products as they are and spreads one large channel over all (the incoherent processing of FlashAttention-3,
arXiv:2407.08608). Scales are powers of two, by which a number of float8 loses nothing.

On NVIDIA tokens have another order within every 16 of the latter: that in which a thread holds its scores, so that a tile of
weights is a left operand where it is. A product over tokens does not depend on their order.
"""

import triton
import triton.language as tl

from llmtrain.kernels.launch import jit

BLOCK = 128
"""Tokens of one scale."""


@triton.jit
def power_of_two(largest, LARGEST: tl.constexpr):
    """The smallest power of two that brings `largest` below LARGEST, when divided by it."""
    return tl.exp2(tl.ceil(tl.log2(tl.maximum(largest, 1e-30) / LARGEST)))


@triton.jit
def ordered(ROWS: tl.constexpr, REORDERED: tl.constexpr):
    """Token at each place of ROWS."""
    at = tl.arange(0, ROWS)
    if REORDERED:
        return at // 16 * 16 + at // 2 % 2 * 8 + at // 4 % 4 * 2 + at % 2
    else:
        return at


@triton.jit
def reordered(weight, ROWS: tl.constexpr, COLUMNS: tl.constexpr, REORDERED: tl.constexpr):
    """The columns of [ROWS, COLUMNS] in the order of `ordered`."""
    if REORDERED:
        weight = weight.reshape(ROWS, COLUMNS // 16, 2, 4, 2).permute(0, 1, 3, 2, 4).reshape(ROWS, COLUMNS)
    return weight


@triton.jit
def _rotated(x, HEAD_DIM: tl.constexpr):
    """x [tokens, head_dim] times the Hadamard matrix over sqrt(head_dim): -1 where i & j has an odd number of ones, else 1."""
    channel = tl.arange(0, HEAD_DIM)
    ones = channel[:, None] & channel[None, :]
    ones ^= ones >> 4
    ones ^= ones >> 2
    ones ^= ones >> 1
    return tl.dot(x, (1 - 2 * (ones & 1)).to(x.dtype)) * HEAD_DIM**-0.5


@triton.jit
def _store_rows(target, x, place, HEAD_DIM: tl.constexpr):
    tl.store(target + place[:, None] * HEAD_DIM + tl.arange(0, HEAD_DIM)[None, :], x.to(target.dtype.element_ty))


@triton.jit
def _store_columns(target, x, padded, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.arange(0, HEAD_DIM)[:, None] * padded + tl.arange(0, BLOCK)[None, :]
    tl.store(target + at, tl.trans(x.to(target.dtype.element_ty)))


@triton.jit
def _load(x, token, seq_len, batch, head, x_batch, x_token, x_head, HEAD_DIM: tl.constexpr):
    at = x + batch.to(tl.int64) * x_batch + head * x_head
    at += token[:, None] * x_token + tl.arange(0, HEAD_DIM)[None, :]
    return tl.load(at, mask=(token < seq_len)[:, None], other=0.0)


@jit
def quantise_inputs(
    x, rows, columns, row_scales, column_scales, x_batch, x_token, x_head, seq_len, padded,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REORDERED: tl.constexpr, LARGEST: tl.constexpr,
    BY_NORM: tl.constexpr,
):  # fmt: skip
    """x [batch, T, HEADS, HEAD_DIM], by strides, as rows [batch, HEADS, padded, HEAD_DIM], rotated, and as columns [batch, HEADS,
    HEAD_DIM, padded] (either may be None), with scales [batch, HEADS, padded / BLOCK]. Program (block of tokens, sequence and
    head). BY_NORM: the longest row, instead of the largest number, comes below LARGEST.
    """
    block, pair = tl.program_id(0), tl.program_id(1)
    place = block * BLOCK + ordered(BLOCK, REORDERED)
    value = _load(x, place, seq_len, pair // HEADS, pair % HEADS, x_batch, x_token, x_head, HEAD_DIM)
    at = pair.to(tl.int64) * padded * HEAD_DIM
    scale = pair * (padded // BLOCK) + block
    wide = value.to(tl.float32)
    norm = tl.sqrt(tl.max(tl.sum(wide * wide, 1), 0))
    if rows is not None:
        turned = _rotated(value, HEAD_DIM)
        unit = power_of_two(norm if BY_NORM else tl.max(tl.abs(turned)), LARGEST)
        tl.store(row_scales + scale, unit)
        _store_rows(rows + at, turned / unit, place, HEAD_DIM)
    if columns is not None:
        unit = power_of_two(norm if BY_NORM else tl.max(tl.abs(wide)), LARGEST)
        tl.store(column_scales + scale, unit)
        _store_columns(columns + at + block * BLOCK, wide / unit, padded, HEAD_DIM, BLOCK)


@jit
def quantise_gradients(
    q, out, dout, row_max, row_inverse, q_rows, q_columns, do_rows, do_columns, delta, factor,
    q_scales, q_column_scales, do_column_scales,
    q_batch, q_token, q_head, do_batch, do_token, do_head, seq_len, padded,
    HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK: tl.constexpr, REORDERED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """Operands of the backward pass that have a query in each row. Program (block of tokens, sequence and head).

    With P = p row_inverse, p = exp(score - row_max): do_rows is dO u, rotated, where u, a power of two per query, brings every row
    to about LARGEST; delta = rowsum(dO O) u. So p (dO V^T u - delta) has one bound for all queries, and what brings it to dS,
    factor = row_inverse / u, is in the other operand of dK: q_columns = q factor. do_columns = dO row_inverse, for dV = p^T of it.
    """
    block, pair = tl.program_id(0), tl.program_id(1)
    batch, head = pair // HEADS, pair % HEADS
    place = block * BLOCK + ordered(BLOCK, REORDERED)
    gradient = _load(dout, place, seq_len, batch, head, do_batch, do_token, do_head, HEAD_DIM)
    output = _load(out, place, seq_len, batch, head, seq_len * HEADS * HEAD_DIM, HEADS * HEAD_DIM, HEAD_DIM, HEAD_DIM)
    query = _load(q, place, seq_len, batch, head, q_batch, q_token, q_head, HEAD_DIM)
    at = pair.to(tl.int64) * padded * HEAD_DIM
    stats, scale = pair * padded + place, pair * (padded // BLOCK) + block
    inverse = tl.load(row_inverse + stats)

    wide = gradient.to(tl.float32)
    unit = power_of_two(tl.sqrt(tl.sum(wide * wide, 1)), LARGEST)
    tl.store(delta + stats, tl.sum(wide * output.to(tl.float32), 1) / unit)
    _store_rows(do_rows + at, _rotated(gradient, HEAD_DIM) / unit[:, None], place, HEAD_DIM)
    weighted = wide * inverse[:, None]
    column_unit = power_of_two(tl.max(tl.abs(weighted)), LARGEST)
    tl.store(do_column_scales + scale, column_unit)
    _store_columns(do_columns + at + block * BLOCK, weighted / column_unit, padded, HEAD_DIM, BLOCK)

    turned = _rotated(query, HEAD_DIM)
    row_unit = power_of_two(tl.max(tl.abs(turned)), LARGEST)
    tl.store(q_scales + scale, row_unit)
    _store_rows(q_rows + at, turned / row_unit, place, HEAD_DIM)
    tl.store(factor + stats, inverse * unit)
    weighted = query.to(tl.float32) * (inverse * unit)[:, None]
    column_unit = power_of_two(tl.max(tl.abs(weighted)), LARGEST)
    tl.store(q_column_scales + scale, column_unit)
    _store_columns(q_columns + at + block * BLOCK, weighted / column_unit, padded, HEAD_DIM, BLOCK)
