"""States of Mamba-2's scan at the borders of chunks, in Triton: one program per head goes from chunk to chunk.

Forward, what is added to a state is rounded to the dtype of x. For the backward in 16 bits it and the states are in fp16 with
powers of two (triton_half.py), and states and their gradients are passed at once.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.triton_forward import padded, rows_of
from llmtrain.kernels.ssd.triton_half import Keys, exponent_of
from llmtrain.kernels.ssd.triton_launch import PassLaunch


class States(NamedTuple):
    """States at the borders of all chunks, as the kernels pass them on.

    values: [batch, chunks, heads, d_state, head_dim], in the dtype of x; or, if there are exponents, fp16, to be multiplied
    by 2^exponent. exponents: [batch, chunks, heads, parts] in fp32, for parts of `columns` of head_dim. added: of what is
    added to a state, x or dy times its weight, by tiles instead of chunks: divided by 2^exponent it is at most 2^14.
    """

    values: Tensor
    exponents: Tensor | None
    added: Tensor | None
    columns: int


def pass_states(
    x: Tensor,
    B: Tensor,
    times: Tensor,
    begun: Tensor | None,
    start: Tensor | None,
    chunk: int,
    precision: str,
    launch: PassLaunch,
    last: Tensor | None = None,
) -> Tensor:
    """The states before all chunks, [batch, chunks, heads, d_state, head_dim] in the dtype of x.

    x: [batch, T, heads, head_dim]; B: [batch, T, groups, d_state]; start, and last (the state after all, filled if it is
    wanted): [batch, heads, head_dim, d_state], fp32 and contiguous.
    """
    states = room(x, B, chunk, chunk, False, launch)
    _launch((x, Keys(B, None), start, states, last), None, times, begun, chunk, chunk, precision, launch)
    return states.values


def pass_both(
    x: Tensor,
    B: Keys,
    start: Tensor | None,
    dy: Tensor,
    C: Keys,
    end: Tensor | None,
    d_start: Tensor | None,
    times: Tensor,
    begun: Tensor | None,
    chunk: int,
    tile: int,
    precision: str,
    launch: PassLaunch,
) -> tuple[States, States]:
    """The states before all chunks, and the gradients of those after them, which are passed on from the last chunk to the
    first: dy and C in place of x and B.

    end: the gradient of the last state; d_start: that of start, filled if it is wanted; both as start of pass_states.
    tile: tokens that are read at a time, a chunk or a part of one.
    """
    scaled = B.exponents is not None
    states, d_states = (room(t, B.values, chunk, tile, scaled, launch) for t in (x, dy))
    back = (dy, C, end, d_states, d_start)
    _launch((x, B, start, states, None), back, times, begun, chunk, tile, precision, launch)
    return states, d_states


def room(values: Tensor, keys: Tensor, chunk: int, tile: int, scaled: bool, launch: PassLaunch) -> States:
    batch, seq_len, n_heads, head_dim = values.shape
    chunks, columns = triton.cdiv(seq_len, chunk), min(launch.columns, padded(head_dim))
    dtype = torch.float16 if scaled else values.dtype
    states = torch.empty((batch, chunks, n_heads, keys.shape[3], head_dim), dtype=dtype, device=values.device)
    exponents, added = None, None
    if scaled:
        shape = (batch, chunks, n_heads, launch.tiles(head_dim))
        exponents = torch.empty(shape, dtype=torch.float32, device=values.device)
        added = torch.empty((batch, chunks * (chunk // tile), *shape[2:]), dtype=torch.float32, device=values.device)
    return States(states, exponents, added, columns)


def _launch(
    ahead: tuple[Any, ...],
    back: tuple[Any, ...] | None,
    times: Tensor,
    begun: Tensor | None,
    chunk: int,
    tile: int,
    precision: str,
    launch: PassLaunch,
) -> None:
    """ahead, back: values, keys, what to start with, where to put the states, and where the last of them."""
    pointers, strides = [], []
    for direction in (ahead, back):
        values, keys, start, states, last = direction or ahead
        pointers += [values, *keys, start, *states[:3], last]
        strides += [*values.stride()[:3], *keys.values.stride()[:3]]
    values, keys, _, states, _ = ahead
    batch, seq_len, n_heads, head_dim = values.shape
    n_groups, d_state = keys.values.shape[2:]
    _pass_states[launch.tiles(head_dim), n_heads, batch * (1 if back is None else 2)](
        *pointers,
        *(times, begun, seq_len, times.shape[2], *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        TILE=tile,
        ROWS=padded(d_state),
        COLUMNS=states.columns,
        BOTH=back is not None,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )


@triton.jit
def _pass_states(
    x, B, of_B, start, states, exponents, added, last, dy, C, of_C, end, d_states, d_exponents, d_added, d_start,
    times, begun, seq_len, chunks,
    x_row, x_token, x_head, B_row, B_token, B_group, dy_row, dy_token, dy_head, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOTH: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of the state's columns, head, direction and row of the batch). The state stays in fp32 registers from
    end to end.
    """
    part, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    parts, n_heads = tl.num_programs(0), tl.num_programs(1)
    n, p, q = tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
    TILES: tl.constexpr = CHUNK // TILE
    tiles = (seq_len + TILE - 1) // TILE
    group, n_groups = head // HEADS_PER_GROUP, n_heads // HEADS_PER_GROUP
    back = False
    if BOTH:
        batch = tl.num_programs(2) // 2
        back = row >= batch
        row = tl.where(back, row - batch, row)
        x, B, states = tl.where(back, dy, x), tl.where(back, C, B), tl.where(back, d_states, states)
        x_row, x_token, x_head = (
            tl.where(back, dy_row, x_row),
            tl.where(back, dy_token, x_token),
            tl.where(back, dy_head, x_head),
        )
        B_row, B_token, B_group = (
            tl.where(back, C_row, B_row),
            tl.where(back, C_token, B_token),
            tl.where(back, C_group, B_group),
        )
        if exponents is not None:
            exponents, added = tl.where(back, d_exponents, exponents), tl.where(back, d_added, added)
            of_B = tl.where(back, of_C, of_B)

    x += row * x_row + head * x_head
    B += row * B_row + group * B_group
    times += (row * n_heads + head) * chunks * (2 * CHUNK)
    states += (row * chunks * n_heads + head) * (D_STATE * HEAD_DIM)
    inside = n[:, None] * HEAD_DIM + p[None, :]  # of a state that is kept transposed
    outside = (row * n_heads + head) * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE + n[:, None]

    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if start is not None:
        state = tl.load(start + outside, mask=valid & (not back), other=0.0)
    if BOTH and end is not None:
        state += tl.load(end + outside, mask=valid & back, other=0.0)
    # What no number of the state exceeds, without asking all of them: so much less is lost in waiting than in range.
    bound = tl.max(tl.abs(state))
    for turn in tl.range(0, chunks * TILES, num_stages=STAGES):
        tile = turn
        if BOTH:
            tile = tl.where(back, chunks * TILES - 1 - turn, turn)
        chunk, within = tile // TILES, tile % TILES
        if turn % TILES == 0:
            stored = state
            if exponents is not None:
                of_state = exponent_of(bound)
                stored = state * tl.exp2(-of_state)
                tl.store(exponents + ((row * chunks + chunk) * n_heads + head) * parts + part, of_state)
            to = states + chunk.to(tl.int64) * n_heads * (D_STATE * HEAD_DIM)
            tl.store(to + inside, stored.to(states.dtype.element_ty), mask=valid)

        first = tile * TILE
        v = rows_of(x + first.to(tl.int64) * x_token, q, p, x_token, seq_len - first, HEAD_DIM)
        k = rows_of(B + first.to(tl.int64) * B_token, q, n, B_token, seq_len - first, D_STATE)
        of_chunk = times + chunk * (2 * CHUNK) + within * TILE
        a, a_end = tl.load(of_chunk + q), tl.load(of_chunk + TILE - 1)
        a_begin = tl.load(of_chunk - 1, mask=within > 0, other=0.0)
        step = tl.load(of_chunk + CHUNK + q)
        keep = tl.exp2(a_end - a_begin)
        weight = tl.exp2(a_end - a) * step
        if BOTH:
            weight = tl.where(back, tl.exp2(a - a_begin), weight)
        if begun is not None:
            count_at = begun + row * chunks * CHUNK + first
            count, count_end = tl.load(count_at + q), tl.load(count_at + TILE - 1)
            count_begin = tl.load(count_at - 1, mask=within > 0, other=0)
            keep = tl.where(count_end == count_begin, keep, 0.0)
            weight = tl.where(count == tl.where(back, count_begin, count_end), weight, 0.0)
        weighted = v.to(tl.float32) * weight[:, None]
        if exponents is not None:
            of_k = tl.load(of_B + (row * tiles + tile) * n_groups + group, mask=tile < tiles, other=0.0)
            # No less than what a state of this size, divided by as much, overflows with.
            of_v = tl.maximum(exponent_of(tl.max(tl.abs(weighted))), exponent_of(bound) - of_k - 60.0)
            tl.store(added + ((row * chunks * TILES + tile) * n_heads + head) * parts + part, of_v)
            half, of_both = (weighted * tl.exp2(-of_v)).to(k.dtype), of_v + of_k
            state = tl.dot(tl.trans(k), half, acc=state * (keep * tl.exp2(-of_both)), input_precision=PRECISION)
            state *= tl.exp2(of_both)
            bound = bound * keep + tl.exp2(of_both + 28.0) * TILE
        else:
            state = tl.dot(tl.trans(k), weighted.to(k.dtype), acc=state * keep, input_precision=PRECISION)
    if last is not None and not BOTH:
        tl.store(last + outside, state, mask=valid)
    if BOTH and d_start is not None:
        tl.store(d_start + outside, state, mask=valid & back)
