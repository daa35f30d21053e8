"""States of Mamba-2's scan at the borders of chunks, in Triton: one program per head goes from chunk to chunk.

For the backward in 16 bits they are kept in fp16 with a power of two for each tile, an eighth of bf16's rounding in the same
bytes, and what is added to them is rounded to twice the bits: the gradient of A is a small difference of what passes
through them (docs/kernels.md).
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.triton_forward import padded, rows_of
from llmtrain.kernels.ssd.triton_launch import PassLaunch


class States(NamedTuple):
    """States at the borders of all chunks, as their kernels pass them on.

    values: [batch, chunks, heads, d_state, head_dim], in the dtype of x; or, if there are exponents, fp16, to be multiplied
    by 2^exponent. exponents: [2, batch, chunks, heads, tiles] in fp32, for tiles of `columns` of head_dim: of the state, and
    of what was added in that chunk (x, or the gradient of y), which is at most 2^14 after division by 2^exponent.
    """

    values: Tensor
    exponents: Tensor | None
    columns: int


def pass_states(
    values: Tensor,
    keys: Tensor,
    times: Tensor,
    begun: Tensor | None,
    start: Tensor | None,
    chunk: int,
    reverse: bool,
    precision: str,
    launch: PassLaunch,
    last: Tensor | None = None,
    scaled: bool = False,
) -> States:
    """The states before all chunks. Fills `last`, if it is wanted.

    values: [batch, T, heads, head_dim]; keys: [batch, T, groups, d_state]; start, and last (the state after all):
    [batch, heads, head_dim, d_state], fp32 and contiguous. Forward, values are x and keys B. With `reverse`, values are
    the gradient of y and keys C: what is passed, from the last chunk to the first, is the gradient of the state *after*
    each chunk. scaled: with exponents, and with an eighth of bf16's rounding.
    """
    batch, seq_len, n_heads, head_dim = values.shape
    n_groups, d_state = keys.shape[2:]
    chunks = times.shape[2]
    dtype = torch.float16 if scaled else values.dtype
    states = torch.empty((batch, chunks, n_heads, d_state, head_dim), dtype=dtype, device=values.device)
    exponents = None
    if scaled:
        shape = (2, batch, chunks, n_heads, launch.tiles(head_dim))
        exponents = torch.empty(shape, dtype=torch.float32, device=values.device)
    columns = min(launch.columns, padded(head_dim))
    _pass_states[launch.tiles(head_dim), n_heads, batch](
        *(values, keys, times, begun, start, states, exponents, last),
        *(seq_len, chunks, *values.stride()[:3], *keys.stride()[:3]),
        HEADS_PER_GROUP=n_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        ROWS=padded(d_state),
        COLUMNS=columns,
        REVERSE=reverse,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )
    return States(states, exponents, columns)


@triton.jit
def _pass_states(
    values,
    keys,
    times,
    begun,
    start,
    states,
    exponents,
    last,
    seq_len,
    chunks,
    values_row,
    values_token,
    values_head,
    keys_row,
    keys_token,
    keys_group,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (tile of the state, head, row of the batch). The state stays in fp32 registers from end to end."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(1)
    n, p = tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
    q = tl.arange(0, CHUNK)

    values += row * values_row + head * values_head
    keys += row * keys_row + (head // HEADS_PER_GROUP) * keys_group
    times += (row * n_heads + head) * chunks * (2 * CHUNK)
    states += (row * chunks * n_heads + head) * (D_STATE * HEAD_DIM)
    inside = n[:, None] * HEAD_DIM + p[None, :]  # of a state that is kept transposed
    outside = (row * n_heads + head) * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE + n[:, None]

    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if start is not None:
        state = tl.load(start + outside, mask=valid, other=0.0)
    for i in tl.range(0, chunks, num_stages=STAGES):
        c = i
        if REVERSE:
            c = chunks - 1 - i
        to = states + c.to(tl.int64) * n_heads * (D_STATE * HEAD_DIM)
        stored = state
        if exponents is not None:
            of_state = exponent_of(state)
            stored = state * tl.exp2(-of_state)
            of_tile = ((row * chunks + c) * n_heads + head) * tl.num_programs(0) + tl.program_id(0)
            tl.store(exponents + of_tile, of_state)
        tl.store(to + inside, stored.to(states.dtype.element_ty), mask=valid)

        first = c * CHUNK
        v = rows_of(values + first.to(tl.int64) * values_token, q, p, values_token, seq_len - first, HEAD_DIM)
        k = rows_of(keys + first.to(tl.int64) * keys_token, q, n, keys_token, seq_len - first, D_STATE)
        a, a_end = tl.load(times + 2 * first + q), tl.load(times + 2 * first + CHUNK - 1)
        keep = tl.exp2(a_end)
        if REVERSE:
            weight = tl.exp2(a)
        else:
            weight = tl.exp2(a_end - a) * tl.load(times + 2 * first + CHUNK + q)
        if begun is not None:
            count = tl.load(begun + row * chunks * CHUNK + first + q)
            count_end = tl.load(begun + row * chunks * CHUNK + first + CHUNK - 1)
            keep = tl.where(count_end == 0, keep, 0.0)
            if REVERSE:
                weight = tl.where(count == 0, weight, 0.0)
            else:
                weight = tl.where(count == count_end, weight, 0.0)
        weighted = v.to(tl.float32) * weight[:, None]
        rounded = weighted.to(v.dtype)
        state = tl.dot(tl.trans(k), rounded, acc=state * keep, input_precision=PRECISION)
        if exponents is not None:
            rest = (weighted - rounded.to(tl.float32)).to(v.dtype)
            state = tl.dot(tl.trans(k), rest, acc=state, input_precision=PRECISION)
            of_all = tl.num_programs(2).to(tl.int64) * chunks * n_heads * tl.num_programs(0)
            tl.store(exponents + of_all + of_tile, exponent_of(v.to(tl.float32)))
    if last is not None:
        tl.store(last + outside, state, mask=valid)


@triton.jit
def exponent_of(tile):
    """e, so that all of a tile is at most 2^14 after division by 2^e: fp16 holds it, to 2^-24 of the largest or finer."""
    return tl.floor(tl.log2(tl.maximum(tl.max(tl.abs(tile)), 1e-30))) - 13.0


@triton.jit
def scaled_down(tile, exponent):
    """In fp16, divided by 2^exponent (a number, or a tile of them)."""
    return (tile.to(tl.float32) * tl.exp2(-exponent)).to(tl.float16)


@triton.jit
def parts_of(exponents, state, p, HEAD_DIM: tl.constexpr, PART: tl.constexpr):
    """Of one state: of every column, [1, columns]; or one number, if a program passed all of them on."""
    PARTS: tl.constexpr = (HEAD_DIM + PART - 1) // PART
    if PARTS == 1:
        return tl.load(exponents + state)
    else:
        return tl.load(exponents + state * PARTS + tl.minimum(p // PART, PARTS - 1))[None, :]
