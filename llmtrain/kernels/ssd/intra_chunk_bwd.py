"""Mamba-2's state-space duality in Triton, backward: what passes through the pairs of a chunk; and the terms of all of it.

In the terms of triton_forward.py, with R the gradient of the state after the chunk, kept transposed like S, and for
each head, j <= i:   G_ij = C_i . B_j,   L_ij = 2^(a_i - a_j),   T_ij = dy_i . x_j,

    u_j = sum_i G_ij L_ij dy_i + 2^(a_end - a_j) B_j R        dx_j = dt_j u_j + D dy_j,   ddt_j = x_j . u_j + ...
    dC_i = sum over heads of  sum_j T_ij L_ij dt_j B_j + 2^a_i S dy_i
    dB_j = sum over heads of  sum_i T_ij L_ij dt_j C_i + dt_j 2^(a_end - a_j) R x_j
    da_i = sum_{j < i} G_ij L_ij T_ij dt_j + 2^a_i C_i . S dy_i
    da_j = - sum_{i > j} G_ij L_ij T_ij dt_j - dt_j 2^(a_end - a_j) x_j . B_j R
    da_end = 2^a_end S . R + sum_j dt_j 2^(a_end - a_j) x_j . B_j R

(da is that of the natural log.) Here are dx and what passes through pairs; triton_states.py has what passes through the
states on either side of a chunk. T is computed once and serves all; the sum over heads of T L dt is multiplied with B and C
once per program. The row and column sums of one fp32 matrix make up da: taken from y, rounded, they would not cancel.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.block_scaled_fp16 import Keys, parts_of, two
from llmtrain.kernels.ssd.head_blocks import blocks_of_heads, token_stride
from llmtrain.kernels.ssd.state_passing import States
from llmtrain.kernels.ssd.triton_forward import never, padded, rows_described, rows_of
from llmtrain.kernels.ssd.triton_launch import HeadsLaunch


def through_pairs(
    dy: Tensor,
    x: Tensor,
    keys: Keys,
    D: Tensor,
    times: Tensor,
    begun: Tensor | None,
    states: States,
    vectors: Tensor,
    chunk: int,
    tile: int,
    precision: str,
    launch: HeadsLaunch,
    processors: int,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """What passes through the pairs of a tile, and all of dx but what comes to it through other tiles of its chunk.

    Fills `vectors`, [batch, heads, chunks, 3, chunk] (see decay_gradients). dx: where to put it
    (`token_stride` says what it may be), else memory of its own. Returns dx; the gradients of the pairs by blocks of heads,
    [blocks, batch, tiles, groups, tile, tile]; and B_j . C_j, [batch, chunks, groups, chunk].
    """
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = keys.B.shape[2:]
    chunks, tiles = times.shape[2], triton.cdiv(seq_len, tile)
    heads, blocks = blocks_of_heads(x, n_groups, tiles, launch, processors)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    # What comes next multiplies them with B and C, in their dtype.
    d_pairs = torch.empty((blocks, batch, tiles, n_groups, tile, tile), dtype=x.dtype, device=x.device)
    diagonal = torch.empty((batch, chunks, n_groups, chunk), dtype=torch.float32, device=x.device)
    strides = tuple(s for t in (dy, x, keys.B, keys.C) for s in t.stride()[:3])
    wanted = launch.described and d_state == padded(d_state)
    views = [rows_described(wanted, t, tile) for t in (dy, x)]
    views += [
        rows_described(wanted, states.values[1].view(1, -1, 1, head_dim), d_state),
        rows_described(wanted, dx, tile),
    ]
    fetched = all(view is not None for view in views)
    dy, x, after, into = views if fetched else (dy, x, states.values[1], dx)
    _through_pairs[n_groups * blocks, tiles, batch](
        *(dy, x, keys.B, keys.C, *two(keys.exponents), D, times, begun, after, two(states.exponents)[1]),
        *(into, d_pairs, diagonal, vectors),
        *(seq_len, *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        TILE=tile,
        ROWS=padded(d_state),
        COLUMNS=padded(head_dim),
        PART=states.columns,
        HEADS=heads,
        TOKEN=token_stride(dx),
        DESCRIBED=fetched,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )
    return dx, d_pairs, diagonal


@triton.jit
def _through_pairs(
    dy, x, B, C, of_B, of_C, D, times, begun, d_states, d_exponents, dx, d_pairs, diagonal, vectors,
    seq_len, dy_row, dy_token, dy_head, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr,
    TOKEN: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch). Matrices over pairs are [j, i], j <= i."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS - 1) // HEADS
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    TILES: tl.constexpr = CHUNK // TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    tile, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles, batch = tl.num_programs(1), tl.num_programs(2)
    # The tiles of a chunk are neighbours: one finds in the L2 cache the states that the other has read.
    chunk, chunks, within = tile // TILES, (tiles + TILES - 1) // TILES, tile % TILES * TILE
    first = tile * TILE
    q, n, p = tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, COLUMNS)

    if not DESCRIBED:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        x += row * x_row + first.to(tl.int64) * x_token
        d_states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
        dx += (row * seq_len + first) * TOKEN
    times += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)  # a_end is at the end of the chunk
    vectors += (row * N_HEADS * chunks + chunk) * (3 * CHUNK) + within
    of_group = (row * chunks + chunk) * N_GROUPS + group
    tokens = seq_len
    seq_len -= first  # tokens from here on

    b = rows_of(B + row * B_row + group * B_group + first.to(tl.int64) * B_token, q, n, B_token, seq_len, D_STATE)
    c = rows_of(C + row * C_row + group * C_group + first.to(tl.int64) * C_token, q, n, C_token, seq_len, D_STATE)
    count, count_end = None, None
    if begun is not None:
        count = tl.load(begun + row * chunks * CHUNK + first + q)
        count_end = tl.load(begun + row * chunks * CHUNK + chunk * CHUNK + CHUNK - 1)
    # Powers of two are put back where an exponential is taken anyway.
    of_b, of_pair = 0.0, 0.0
    if d_exponents is not None:
        at = (row * tiles + tile) * N_GROUPS + group
        of_b = tl.load(of_B + at)
        of_pair = of_b + tl.load(of_C + at)
    same = tl.sum(b.to(tl.float32) * c.to(tl.float32), 1) * tl.exp2(0.0 + of_pair)
    if block == 0:
        tl.store(diagonal + of_group * CHUNK + within + q, same)

    d_bc = tl.zeros((TILE, TILE), tl.float32)
    begin = group * HEADS_PER_GROUP + block * HEADS
    end = tl.minimum(begin + HEADS, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=STAGES):
        found = vectors + head * chunks * (3 * CHUNK) + q
        of_head = head * chunks * (2 * CHUNK)
        if DESCRIBED:
            token, state_at = tl.program_id(2) * tokens + first, (tl.program_id(2) * chunks + chunk) * N_HEADS + head
            x_in = x.load([token, head * HEAD_DIM])
            dy_in = dy.load([token, head * HEAD_DIM])
            d_state = d_states.load([state_at * D_STATE, 0])
        else:
            x_in = rows_of(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)
            dy_in = rows_of(dy + head * dy_head, q, p, dy_token, seq_len, HEAD_DIM)
            d_state = rows_of(d_states + head * (D_STATE * HEAD_DIM), n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a, step = tl.load(times + of_head + within + q), tl.load(times + of_head + CHUNK + within + q)
        a_end = tl.load(times + of_head + CHUNK - 1)
        of_state, highest = 0.0, 0.0
        if d_exponents is not None:
            of_state = parts_of(d_exponents, (row * chunks + chunk) * N_HEADS + head, p, HEAD_DIM, PART)
            highest = tl.max(of_state) if HEAD_DIM > PART else of_state
        a_end += of_b + highest
        to_end = tl.exp2(a_end - a)
        later = q[None, :] + never(a_end)
        paired = q[:, None] < later
        if begun is not None:
            to_end = tl.where(count == count_end, to_end, 0.0)
            paired = paired & (count[:, None] == count[None, :])

        d_pair = tl.dot(x_in, tl.trans(dy_in), input_precision=PRECISION)
        tl.store(found + 2 * CHUNK, tl.sum(tl.where(q[:, None] == later, d_pair, 0.0), 1))
        decay = tl.exp2((a + of_pair)[None, :] - a[:, None])  # overflows only where it is masked
        d_bc += d_pair * decay * step[:, None]  # masked, and divided by 2^of_pair, after the loop
        # B C^T again for every head: held over the loop it would cost as many registers as d_bc.
        decayed = tl.where(paired, tl.dot(b, tl.trans(c), input_precision=PRECISION) * decay, 0.0)
        d_pair *= decayed
        tl.store(found + CHUNK, tl.sum(d_pair, 1))
        tl.store(found, tl.sum(d_pair * step[:, None], 0))
        u = tl.dot(b, d_state, input_precision=PRECISION) * to_end[:, None]
        if d_exponents is not None and HEAD_DIM > PART:
            u *= tl.exp2(of_state - highest)
        u = tl.dot(decayed.to(dy_in.dtype), dy_in, acc=u, input_precision=PRECISION)
        # Where j = i nothing decays: in da it cancels, and its rounding could be all that is left. So it is not in there.
        on_dy = tl.load(D + head).to(tl.float32) + same * step
        d_x = u * step[:, None] + on_dy[:, None] * dy_in.to(tl.float32)
        if DESCRIBED:
            dx.store([token, head * HEAD_DIM], d_x.to(dx.dtype))
        else:
            to = q[:, None] * TOKEN + p[None, :]
            inside = (q < seq_len)[:, None] & (p < HEAD_DIM)[None, :]
            tl.store(dx + head * HEAD_DIM + to, d_x.to(dx.dtype.element_ty), mask=inside)

    paired = q[:, None] <= q[None, :]
    if begun is not None:
        paired = paired & (count[:, None] == count[None, :])
    of_block = ((block * batch + row) * tiles + tile) * N_GROUPS + group
    d_bc = tl.where(paired, d_bc * tl.exp2(-of_pair), 0.0).to(d_pairs.dtype.element_ty)
    tl.store(d_pairs + of_block * (TILE * TILE) + q[:, None] * TILE + q[None, :], d_bc)
