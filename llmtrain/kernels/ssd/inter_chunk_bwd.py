"""Mamba-2's state-space duality in Triton, backward: what passes through the states before and after a chunk.

In the terms of triton_pairs.py: dC comes through the state before the chunk, S, and dB through the gradient of the state
after it, R. Either one program does both, and reads S once; or, where states are so wide that its sums over heads would fill
all registers, one kernel each.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false, reportPossiblyUnboundVariable=false
# pyright: reportOptionalMemberAccess=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.block_scaled_fp16 import parts_of, two
from llmtrain.kernels.ssd.head_blocks import add_parts, blocks_of_heads, parts_like, token_stride
from llmtrain.kernels.ssd.state_passing import States
from llmtrain.kernels.ssd.triton_forward import padded, rows_described, rows_of
from llmtrain.kernels.ssd.triton_launch import HeadsLaunch

_NARROW = 64
"""d_state up to which one program does both sides."""


def through_states(
    dy: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    times: Tensor,
    begun: Tensor | None,
    d_pairs: Tensor,
    d_across: Tensor | None,
    states: States,
    vectors: Tensor,
    chunk: int,
    tile: int,
    precision: str,
    launch: HeadsLaunch,
    processors: int,
    dB: Tensor | None = None,
    dC: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dB, dC, and 2^a_end S . R by parts of the states, [batch, chunks, parts, heads].

    With all that becomes of the gradients of pairs. d_pairs, and d_across from triton_across.py if tiles are halves of
    chunks: by blocks of heads, whose number may be another here. Adds to the first of `vectors`, and puts after_j
    (see decay_gradients) into `times` in place of the steps. dB, dC: where to put them, slices of one tensor (as dx of
    through_pairs).
    """
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    chunks, tiles, rows = times.shape[2], chunk // tile, padded(d_state)
    # The tiles of a chunk share S . R where a part of the states is as wide as a product should be.
    parts = tiles if rows >= 64 * tiles else 1
    heads, blocks = blocks_of_heads(x, n_groups, chunks * tiles, launch, processors)
    passed = torch.empty((batch, chunks, parts, n_heads), dtype=torch.float32, device=dy.device)
    dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) if d is None else d for t, d in ((B, dB), (C, dC)))
    strides = tuple(s for t in (dy, x, B, C) for s in t.stride()[:3])
    # A last chunk without a second tile would take that of the next sequence: only loads through a mask know its end.
    wanted = launch.described and d_state == rows and seq_len % chunk == 0
    views = [rows_described(wanted, t, tile) for t in (dy, x)]
    views += [rows_described(wanted, t.view(1, -1, 1, head_dim), rows // parts) for t in states.values]
    fetched = all(view is not None for view in views)
    dy, x, before, after = views if fetched else (dy, x, *states.values)
    for of_B, of_C in [(True, True)] if rows <= _NARROW else [(True, False), (False, True)]:
        into_B, into_C, token = dB, dC, token_stride(dB if of_B else dC)
        assert not (of_B and of_C) or token == token_stride(dC)
        if blocks > 1:  # else their sums are final
            token = n_groups * d_state
            into_B, into_C = parts_like(dB, blocks) if of_B else dB, parts_like(dC, blocks) if of_C else dC
        _through_states[n_groups * blocks, chunks * tiles, batch](
            *(dy, x, B, C, times, begun, d_pairs, d_across, before, after),
            *(*two(states.exponents), *two(states.added), into_B, into_C, passed, vectors),
            *(seq_len, d_pairs.shape[0], 0 if d_across is None else d_across.shape[0], *strides),
            OF_B=of_B,
            OF_C=of_C,
            HEADS_PER_GROUP=n_heads // n_groups,
            N_HEADS=n_heads,
            HEAD_DIM=head_dim,
            D_STATE=d_state,
            CHUNK=chunk,
            TILE=tile,
            PARTS=parts,
            ROWS=rows // parts,
            COLUMNS=padded(head_dim),
            PART=states.columns,
            HEADS=heads,
            TOKEN=token,
            DESCRIBED=fetched,
            PRECISION=precision,
            STAGES=launch.stages,
            **launch.options,
        )
        if blocks > 1 and of_B:
            add_parts(into_B, dB)
        if blocks > 1 and of_C:
            add_parts(into_C, dC)
    return dB, dC, passed


@triton.jit
def _through_states(
    dy, x, B, C, times, begun, d_pairs, d_across, states, d_states,
    exponents, d_exponents, added, d_added, dB, dC, passed, vectors,
    seq_len, pair_blocks, across_blocks, dy_row, dy_token, dy_head, x_row, x_token, x_head,
    B_row, B_token, B_group, C_row, C_token, C_group, OF_B: tl.constexpr, OF_C: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PART: tl.constexpr, HEADS: tl.constexpr,
    TOKEN: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch).

    The tiles of a chunk see the same states. If PARTS is 2, each adds up S . R for its own half of their rows, the near one,
    and takes the far one apart; else the first of them does it for all rows.
    """
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS - 1) // HEADS
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    TILES: tl.constexpr = CHUNK // TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    tile, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles, batch = tl.num_programs(1), tl.num_programs(2)
    # The tiles of a chunk are neighbours: one finds in the L2 cache the states that the other has read.
    chunk, chunks, which = tile // TILES, tiles // TILES, tile % TILES
    first, within = tile * TILE, which * TILE
    part = which if PARTS == 2 else 0
    top, far_top = part * ROWS, (1 - part) * ROWS
    q, p = tl.arange(0, TILE), tl.arange(0, COLUMNS)
    n, far_n = top + tl.arange(0, ROWS), far_top + tl.arange(0, ROWS)

    if not DESCRIBED:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        x += row * x_row + first.to(tl.int64) * x_token
        states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
        d_states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
    of_block = ((block * batch + row) * seq_len + first) * TOKEN + group * D_STATE
    times += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)  # a_end is at the end of the chunk
    vectors += (row * N_HEADS * chunks + chunk) * (3 * CHUNK) + within
    passed += ((row * chunks + chunk) * PARTS + part) * N_HEADS
    tokens = seq_len
    seq_len -= first  # tokens from here on

    B += row * B_row + group * B_group + first.to(tl.int64) * B_token
    C += row * C_row + group * C_group + first.to(tl.int64) * C_token
    b, c = rows_of(B, q, n, B_token, seq_len, D_STATE), rows_of(C, q, n, C_token, seq_len, D_STATE)
    d_b, d_c = tl.zeros((TILE, ROWS), tl.float32), tl.zeros((TILE, ROWS), tl.float32)
    if PARTS == 2:
        far_b, far_c = rows_of(B, q, far_n, B_token, seq_len, D_STATE), rows_of(C, q, far_n, C_token, seq_len, D_STATE)
        d_far_b, d_far_c = tl.zeros((TILE, ROWS), tl.float32), tl.zeros((TILE, ROWS), tl.float32)
    count, count_end = None, None
    if begun is not None:
        count = tl.load(begun + row * chunks * CHUNK + first + q)
        count_end = tl.load(begun + row * chunks * CHUNK + chunk * CHUNK + CHUNK - 1)

    # Each block of heads here takes the pairs of as many blocks there. A last chunk may have no second tile of pairs.
    tiles_of_pairs = (tokens + TILE - 1) // TILE
    for other in range(block, tl.where(seq_len > 0, pair_blocks, 0), BLOCKS):
        of_pairs = d_pairs + (((other * batch + row) * tiles_of_pairs + tile) * N_GROUPS + group) * (TILE * TILE)
        d_bc = tl.load(of_pairs + q[:, None] * TILE + q[None, :])
        if OF_B:
            d_b += tl.dot(d_bc, c, input_precision=PRECISION)
            if PARTS == 2:
                d_far_b += tl.dot(d_bc, far_c, input_precision=PRECISION)
        if OF_C:
            d_c += tl.dot(tl.trans(d_bc), b, input_precision=PRECISION)
            if PARTS == 2:
                d_far_c += tl.dot(tl.trans(d_bc), far_b, input_precision=PRECISION)
    if d_across is not None:
        # Keys of the first half and queries of the second: each takes what the other's matrix gives it.
        for other in range(block, across_blocks, BLOCKS):
            of_pairs = d_across + (((other * batch + row) * chunks + chunk) * N_GROUPS + group) * (TILE * TILE)
            d_bc = tl.load(of_pairs + q[:, None] * TILE + q[None, :])
            if OF_B and which == 0:
                at, left = C + TILE * C_token, seq_len - TILE
                d_b += tl.dot(d_bc, rows_of(at, q, n, C_token, left, D_STATE), input_precision=PRECISION)
                if PARTS == 2:
                    d_far_b += tl.dot(d_bc, rows_of(at, q, far_n, C_token, left, D_STATE), input_precision=PRECISION)
            if OF_C and which == 1:
                at, d_bc = B - TILE * B_token, tl.trans(d_bc)
                d_c += tl.dot(d_bc, rows_of(at, q, n, B_token, TILE, D_STATE), input_precision=PRECISION)
                if PARTS == 2:
                    d_far_c += tl.dot(d_bc, rows_of(at, q, far_n, B_token, TILE, D_STATE), input_precision=PRECISION)
    begin = group * HEADS_PER_GROUP + block * HEADS
    end = tl.minimum(begin + HEADS, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=STAGES):
        of_head = head * chunks * (2 * CHUNK)
        # S is needed on both sides, for S . R.
        if DESCRIBED:
            token, at = (
                tl.program_id(2) * tokens + first,
                ((tl.program_id(2) * chunks + chunk) * N_HEADS + head) * D_STATE,
            )
            state = states.load([at + top, 0])
            if OF_B:
                x_in = x.load([token, head * HEAD_DIM])
                d_state = d_states.load([at + top, 0])
                if PARTS == 2:
                    far_d_state = d_states.load([at + far_top, 0])
            if OF_C:
                dy_in = dy.load([token, head * HEAD_DIM])
                if PARTS == 2:
                    far_state = states.load([at + far_top, 0])
        else:
            at = head * (D_STATE * HEAD_DIM)
            state = rows_of(states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
            if OF_B:
                x_in = rows_of(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)
                d_state = rows_of(d_states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
                if PARTS == 2:
                    far_d_state = rows_of(d_states + at, far_n, p, HEAD_DIM, D_STATE, HEAD_DIM)
            if OF_C:
                dy_in = rows_of(dy + head * dy_head, q, p, dy_token, seq_len, HEAD_DIM)
                if PARTS == 2:
                    far_state = rows_of(states + at, far_n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a = tl.load(times + of_head + within + q)
        of_state, of_d_state, of_x, of_dy = 0.0, 0.0, 0.0, 0.0
        if exponents is not None:
            of_chunk, of_tile = (row * chunks + chunk) * N_HEADS + head, (row * tiles + tile) * N_HEADS + head
            of_state = parts_of(exponents, of_chunk, p, HEAD_DIM, PART)
            if OF_B:
                of_d_state = parts_of(d_exponents, of_chunk, p, HEAD_DIM, PART)
                of_x = of_d_state + parts_of(added, of_tile, p, HEAD_DIM, PART)
                if HEAD_DIM > PART:
                    of_x = tl.max(of_x)
                x_in = (x_in.to(tl.float32) * tl.exp2(of_d_state - of_x)).to(tl.float16)
            if OF_C:
                of_dy = of_state + parts_of(d_added, of_tile, p, HEAD_DIM, PART)
                if HEAD_DIM > PART:
                    of_dy = tl.max(of_dy)
                dy_in = (dy_in.to(tl.float32) * tl.exp2(of_state - of_dy)).to(tl.float16)
        if OF_B:
            steps = times + of_head + CHUNK + within + q
            step, a_end = tl.load(steps), tl.load(times + of_head + CHUNK - 1)
            kept = state.to(tl.float32) * d_state.to(tl.float32) * tl.exp2(a_end + (of_state + of_d_state))
            to_end = tl.exp2(a_end - a + of_x)
            if begun is not None:
                kept = tl.where(count_end == 0, kept, 0.0)
                to_end = tl.where(count == count_end, to_end, 0.0)
            tl.store(passed + head, tl.sum(tl.sum(kept, 1), 0), mask=which < PARTS)
            taken = tl.dot(x_in, tl.trans(d_state), input_precision=PRECISION)
            after = tl.sum(taken * b.to(tl.float32), 1)
            d_b += taken * (to_end * step)[:, None]
            if PARTS == 2:
                taken = tl.dot(x_in, tl.trans(far_d_state), input_precision=PRECISION)
                after += tl.sum(taken * far_b.to(tl.float32), 1)
                d_far_b += taken * (to_end * step)[:, None]
            # In the place of the steps, which nothing reads any more.
            tl.store(steps, after * to_end)
        if OF_C:
            from_start = tl.exp2(a + of_dy)
            if begun is not None:
                from_start = tl.where(count == 0, from_start, 0.0)
            carried = tl.dot(dy_in, tl.trans(state), input_precision=PRECISION)
            earlier = tl.sum(carried * c.to(tl.float32), 1)
            d_c += carried * from_start[:, None]
            if PARTS == 2:
                carried = tl.dot(dy_in, tl.trans(far_state), input_precision=PRECISION)
                earlier += tl.sum(carried * far_c.to(tl.float32), 1)
                d_far_c += carried * from_start[:, None]
            found = vectors + head * chunks * (3 * CHUNK) + q
            tl.store(found, tl.load(found) + earlier * from_start)

    to = of_block + q[:, None] * TOKEN + n[None, :]
    far_to, inside = to + (far_top - top), (q < seq_len)[:, None] & (n < D_STATE)[None, :]
    far_inside = (q < seq_len)[:, None] & (far_n < D_STATE)[None, :]
    if OF_B:
        tl.store(dB + to, d_b.to(dB.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(dB + far_to, d_far_b.to(dB.dtype.element_ty), mask=far_inside)
    if OF_C:
        tl.store(dC + to, d_c.to(dC.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(dC + far_to, d_far_c.to(dC.dtype.element_ty), mask=far_inside)
