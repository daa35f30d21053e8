"""States of Mamba-2's scan at the borders of chunks, in Triton: a program goes from chunk to chunk with a tile of one.

For the backward states and their gradients are passed in one launch: each is bound by latency, and together they fill more
of the device. They are in the dtype of x, and so is what is added to them; or in fp16 with powers of two (triton_half.py).
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.block_scaled_fp16 import Keys, exponent_of
from llmtrain.kernels.ssd.triton_forward import padded, rows_of
from llmtrain.kernels.ssd.triton_launch import PassLaunch


class States(NamedTuple):
    """States before all chunks, and then the gradients of those after them.

    values: [2, batch, chunks, heads, d_state, head_dim], in the dtype of x; or, if there are exponents, fp16, to be
    multiplied by 2^exponent. exponents: [2, batch, chunks, heads, parts] in fp32, for parts of `columns` of head_dim. added:
    the same of what is added to them, x or dy, by tiles instead of chunks: divided by 2^exponent it is at most 2^14.
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
    batch, _, n_heads, head_dim = x.shape
    shape = (batch, times.shape[2], n_heads, B.shape[3], head_dim)
    states = States(torch.empty(shape, dtype=x.dtype, device=x.device), None, None, _columns(launch, head_dim))
    _launch(x, x, Keys(B, B, None), times, None, begun, (start, None, last), states, chunk, chunk, precision, launch)
    return states.values


def pass_both(
    x: Tensor,
    dy: Tensor,
    keys: Keys,
    times: Tensor,
    longest: Tensor | None,
    begun: Tensor | None,
    start: Tensor | None,
    end: Tensor | None,
    d_start: Tensor | None,
    chunk: int,
    tile: int,
    precision: str,
    launch: PassLaunch,
) -> States:
    """The states before all chunks, and the gradients of those after them, which are passed on from the last chunk to the
    first: dy and C in place of x and B.

    longest: of decays, wanted in fp16. end: the gradient of the last state; d_start: that of start, filled if it is wanted;
    both as start of pass_states. tile: tokens that are read at a time, a chunk or a part of one.
    """
    states = room(x, keys, chunk, tile, launch)
    ends = (start, end, d_start)
    _launch(x, dy, keys, times, longest, begun, ends, states, chunk, tile, precision, launch)
    return states


def room(x: Tensor, keys: Keys, chunk: int, tile: int, launch: PassLaunch) -> States:
    """Where pass_both puts what it finds."""
    batch, seq_len, n_heads, head_dim = x.shape
    chunks, scaled = triton.cdiv(seq_len, chunk), keys.exponents is not None
    shape = (2, batch, chunks, n_heads, keys.B.shape[3], head_dim)
    values = torch.empty(shape, dtype=torch.float16 if scaled else x.dtype, device=x.device)
    exponents, added = None, None
    if scaled:
        tiles, parts = chunks * (chunk // tile), triton.cdiv(head_dim, _columns(launch, head_dim))
        exponents = torch.empty((2, batch, chunks, n_heads, parts), dtype=torch.float32, device=x.device)
        added = torch.empty((2, batch, tiles, n_heads, parts), dtype=torch.float32, device=x.device)
    return States(values, exponents, added, _columns(launch, head_dim))


def _columns(launch: PassLaunch, head_dim: int) -> int:
    return min(launch.columns, padded(head_dim))


def _launch(
    x: Tensor,
    dy: Tensor,
    keys: Keys,
    times: Tensor,
    longest: Tensor | None,
    begun: Tensor | None,
    ends: tuple[Tensor | None, ...],
    states: States,
    chunk: int,
    tile: int,
    precision: str,
    launch: PassLaunch,
) -> None:
    """In both directions if `states` has room for both."""
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = keys.B.shape[2:]
    both, rows = states.values.ndim == 6, min(launch.rows, padded(d_state))
    grid = (launch.tiles(d_state, head_dim), n_heads, batch * (2 if both else 1))
    _pass_states[grid](
        *(x, dy, *keys, times, longest, begun, *ends, states.values, states.exponents, states.added),
        *(seq_len, times.shape[2], *(stride for t in (x, dy, keys.B, keys.C) for stride in t.stride()[:3])),
        HEADS_PER_GROUP=n_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        TILE=tile,
        ALL_ROWS=padded(d_state),
        ROWS=rows,
        COLUMNS=states.columns,
        BOTH=both,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )


@triton.jit
def _pass_states(
    x, dy, B, C, of_keys, times, longest, begun, start, end, last, states, exponents, added,
    seq_len, chunks, x_row, x_token, x_head, dy_row, dy_token, dy_head, B_row, B_token, B_group,
    C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    ALL_ROWS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BOTH: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of the state, head, direction and row of the batch). The state stays in fp32 registers from end to end."""
    PARTS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    part, top = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS * ROWS
    head, every = tl.program_id(1), tl.program_id(2)
    n_heads, group = tl.num_programs(1), head // HEADS_PER_GROUP
    n, p, q = top + tl.arange(0, ROWS), part * COLUMNS + tl.arange(0, COLUMNS), tl.arange(0, TILE)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
    TILES: tl.constexpr = CHUNK // TILE
    tiles, n_groups = (seq_len + TILE - 1) // TILE, n_heads // HEADS_PER_GROUP
    # `every` counts rows of the batch in both directions, as do states and exponents.
    row, back = every, False
    if BOTH:
        batch = tl.num_programs(2) // 2
        back = every >= batch
        row = tl.where(back, every - batch, every)
        x, x_row = tl.where(back, dy, x), tl.where(back, dy_row, x_row)
        x_token, x_head = tl.where(back, dy_token, x_token), tl.where(back, dy_head, x_head)
        B, B_row = tl.where(back, C, B), tl.where(back, C_row, B_row)
        B_token, B_group = tl.where(back, C_token, B_token), tl.where(back, C_group, B_group)
    row = row.to(tl.int64)
    first_state, of_row = every.to(tl.int64) * chunks * n_heads + head, row * n_heads + head

    x += row * x_row + head * x_head
    times += of_row * chunks * (2 * CHUNK)
    B += row * B_row + group * B_group
    inside = n[:, None] * HEAD_DIM + p[None, :]  # of a state that is kept transposed
    of_start = of_row * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE
    outside = of_start + n[:, None]

    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    # No number of the state exceeds `bound`, in no tile of its rows. It is looser than a maximum, but no one waits for it, and
    # fp16 has range enough. The state is kept divided by 2^of_state.
    bound, of_state = 0.0, 0.0
    if start is not None:
        state = tl.load(start + outside, mask=valid & (not back), other=0.0)
        bound = _largest(start + of_start, p, not back, D_STATE, HEAD_DIM, ALL_ROWS)
    if end is not None:
        state += tl.load(end + outside, mask=valid & back, other=0.0)
        bound += _largest(end + of_start, p, back, D_STATE, HEAD_DIM, ALL_ROWS)
    for turn in tl.range(0, chunks * TILES, num_stages=STAGES):
        tile = turn
        if BOTH:
            tile = tl.where(back, chunks * TILES - 1 - turn, turn)
        chunk, within = tile // TILES, tile % TILES
        if turn % TILES == 0:
            at = first_state + chunk * n_heads
            stored = state
            if exponents is not None:
                exponent = exponent_of(bound)
                stored = state * tl.exp2(of_state - exponent)
                tl.store(exponents + at * PARTS + part, exponent, mask=top == 0)
            to = states + at * (D_STATE * HEAD_DIM) + inside
            tl.store(to, stored.to(states.dtype.element_ty), mask=valid)

        first = tile * TILE
        v = rows_of(x + first.to(tl.int64) * x_token, q, p, x_token, seq_len - first, HEAD_DIM)
        k = rows_of(B + first.to(tl.int64) * B_token, q, n, B_token, seq_len - first, D_STATE)
        of_chunk = times + chunk * (2 * CHUNK) + within * TILE
        a, a_end = tl.load(of_chunk + q), tl.load(of_chunk + TILE - 1)
        a_begin = tl.load(of_chunk - 1, mask=within > 0, other=0.0)
        step = tl.load(of_chunk + CHUNK + q)
        keep = tl.exp2(a_end - a_begin)
        # Steps may exceed 1, decays may not.
        of_step = 0.0
        if exponents is not None:
            of_step = tl.maximum(tl.ceil(tl.log2(tl.load(longest + of_row * chunks + chunk))), -100.0)
        weight = tl.exp2(a_end - a - of_step) * step
        if BOTH:
            weight, of_step = tl.where(back, tl.exp2(a - a_begin), weight), tl.where(back, 0.0, of_step)
        if begun is not None:
            count_at = begun + row * chunks * CHUNK + first
            count, count_end = tl.load(count_at + q), tl.load(count_at + TILE - 1)
            count_begin = tl.load(count_at - 1, mask=within > 0, other=0)
            keep = tl.where(count_end == count_begin, keep, 0.0)
            weight = tl.where(count == tl.where(back, count_begin, count_end), weight, 0.0)
        v = v.to(tl.float32)
        if exponents is not None:
            of_k = tl.load(of_keys + (every * tiles + tile) * n_groups + group, mask=tile < tiles, other=0.0)
            of_v = exponent_of(tl.max(tl.abs(v)))
            tl.store(added + ((every * chunks * TILES + tile) * n_heads + head) * PARTS + part, of_v, mask=top == 0)
            # No less than what a state of this size, divided by as much, overflows with.
            of_v = tl.maximum(of_v, exponent_of(bound) - of_k - of_step - 60.0)
            half, of_all = (v * weight[:, None] * tl.exp2(-of_v)).to(tl.float16), of_v + of_k + of_step
            kept = state * (keep * tl.exp2(of_state - of_all))
            state, of_state = tl.dot(tl.trans(k), half, acc=kept, input_precision=PRECISION), of_all
            bound = bound * keep + tl.exp2(of_all + 28.0) * TILE
        else:
            state = tl.dot(tl.trans(k), (v * weight[:, None]).to(k.dtype), acc=state * keep, input_precision=PRECISION)
    if last is not None:
        tl.store(last + outside, state * tl.exp2(of_state), mask=valid & (back == BOTH))


@triton.jit
def _largest(of_start, p, wanted, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr, ALL_ROWS: tl.constexpr):
    n = tl.arange(0, ALL_ROWS)
    inside = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :] & wanted
    return tl.max(tl.abs(tl.load(of_start + n[:, None], mask=inside, other=0.0)))
