"""Mamba-2's state-space duality in Triton, backward: gradients within chunks; and the notation of the whole backward.

In the notation of triton_forward.py, with R the gradient of the state after the chunk, kept transposed like S, and for
each head, j <= i:   G_ij = C_i . B_j,   L_ij = 2^(a_i - a_j),   T_ij = dy_i . x_j,

    u_j = sum_i G_ij L_ij dy_i + 2^(a_end - a_j) B_j R        dx_j = dt_j u_j + D dy_j,   ddt_j = x_j . u_j + ...
    dC_i = sum over heads of  sum_j T_ij L_ij dt_j B_j + 2^a_i S dy_i
    dB_j = sum over heads of  sum_i T_ij L_ij dt_j C_i + dt_j 2^(a_end - a_j) R x_j
    da_i = sum_{j < i} G_ij L_ij T_ij dt_j + 2^a_i C_i . S dy_i
    da_j = - sum_{i > j} G_ij L_ij T_ij dt_j - dt_j 2^(a_end - a_j) x_j . B_j R
    da_end = 2^a_end S . R + sum_j dt_j 2^(a_end - a_j) x_j . B_j R

(da is the gradient of the natural log of the decay.) This file has dx and all terms over pairs i, j; inter_chunk_bwd.py has the
terms of the states before and after a chunk. T is computed once and serves all; dCB, the sum over heads of T L dt, is multiplied
with B and C once per program. da is made of row and column sums of one fp32 matrix: taken from y, rounded, they would not cancel.
"""

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.block_scaled_fp16 import ScaledBC, load_exponents, split_exponents
from llmtrain.kernels.ssd.head_blocks import head_blocks, token_stride
from llmtrain.kernels.ssd.state_passing import States
from llmtrain.kernels.ssd.triton_forward import (
    load_skip,
    load_tile,
    opaque_zero,
    own_columns,
    padded,
    skip_options,
    tma_descriptor,
)
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch


def intra_chunk_bwd(
    dy: Tensor, x: Tensor, bc: ScaledBC, D: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, states: States,
    ddA_terms: Tensor, chunk: int, tile: int, precision: str, launch: HeadLoopLaunch, num_sms: int,
    dx: Tensor | None = None, with_dCB: bool = True,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    """Gradients over the pairs of each tile, and all of dx except what comes through other tiles of the same chunk.

    Fills `ddA_terms`, [batch, heads, chunks, 3, chunk] (see chunk_cumsum_bwd). dx: memory for it (see `token_stride`);
    None: allocated. Returns dx; dCB by blocks of heads, [blocks, batch, tiles, groups, tile, tile], if it is wanted; and
    B_j . C_j, [batch, chunks, groups, chunk].
    """
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = bc.B.shape[2:]
    chunks, tiles = dA_cumsum.shape[2], cdiv(seq_len, tile)
    heads, blocks = head_blocks(x, n_groups, tiles, launch, num_sms)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    # inter_chunk_bwd multiplies it with B and C, in their dtype.
    dCB = None
    if with_dCB:
        dCB = torch.empty((blocks, batch, tiles, n_groups, tile, tile), dtype=x.dtype, device=x.device)
    cb_diagonal = torch.empty((batch, chunks, n_groups, chunk), dtype=torch.float32, device=x.device)
    strides = tuple(s for t in (dy, x, bc.B, bc.C) for s in t.stride()[:3])
    wanted = launch.use_tma and d_state == padded(d_state)
    views: list[Any] = [tma_descriptor(wanted, t, tile, narrow=True) for t in (dy, x)]
    views += [
        tma_descriptor(wanted, states.values[1].view(1, -1, 1, head_dim), d_state, narrow=True),
        dx if head_dim % padded(head_dim) else tma_descriptor(wanted, dx, tile),
    ]
    use_tma = all(view is not None for view in views)
    dy, x, after, into = views if use_tma else (dy, x, states.values[1], dx)
    _intra_chunk_bwd[n_groups * blocks, tiles, batch](
        *(dy, x, bc.B, bc.C, *split_exponents(bc.exponents)),
        *(D, dA_cumsum, seq_idx, after, split_exponents(states.exponents)[1]),
        *(into, dCB, cb_diagonal, ddA_terms),
        *(seq_len, *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        **skip_options(D, n_heads),
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        TILE=tile,
        BLOCK_DSTATE=padded(d_state),
        BLOCK_HEADDIM=padded(head_dim),
        EXPONENT_BLOCK=states.block_headdim,
        HEADS_PER_PROGRAM=heads,
        TOKEN_STRIDE=token_stride(dx),
        USE_TMA=use_tma,
        KEEP_CB=launch.keep_cb,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )
    return dx, dCB, cb_diagonal


@jit
def _intra_chunk_bwd(
    dy, x, B, C, B_exponents, C_exponents, D, dA_cumsum, seq_idx, d_states, d_exponents, dx, dCB, cb_diagonal, ddA_terms,
    seq_len, dy_row, dy_token, dy_head, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_PARTS: tl.constexpr, TOKEN_SKIP: tl.constexpr, N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, EXPONENT_BLOCK: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, USE_TMA: tl.constexpr, KEEP_CB: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch). Matrices over pairs are [j, i], j <= i."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    TILES: tl.constexpr = CHUNK // TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    tile, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    tiles, batch = tl.num_programs(1), tl.num_programs(2)
    # The tiles of a chunk are neighbours: one finds the states that the other has read in the L2 cache.
    chunk, chunks, within = tile // TILES, (tiles + TILES - 1) // TILES, tile % TILES * TILE
    first = tile * TILE
    q, n, p = tl.arange(0, TILE), tl.arange(0, BLOCK_DSTATE), tl.arange(0, BLOCK_HEADDIM)

    STORE_TMA: tl.constexpr = USE_TMA and HEAD_DIM == BLOCK_HEADDIM
    if not USE_TMA:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        x += row * x_row + first.to(tl.int64) * x_token
        d_states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
    if not STORE_TMA:
        dx += (row * seq_len + first) * TOKEN_STRIDE
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)  # a_end is at the end of the chunk
    ddA_terms += (row * N_HEADS * chunks + chunk) * (3 * CHUNK) + within
    of_group = (row * chunks + chunk) * N_GROUPS + group
    tokens = seq_len
    seq_len -= first  # tokens from here on

    b_tile = load_tile(
        B + row * B_row + group * B_group + first.to(tl.int64) * B_token, q, n, B_token, seq_len, D_STATE
    )
    c_tile = load_tile(
        C + row * C_row + group * C_group + first.to(tl.int64) * C_token, q, n, C_token, seq_len, D_STATE
    )
    seq_idx_t, seq_idx_last = None, None
    if seq_idx is not None:
        seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + q)
        seq_idx_last = tl.load(seq_idx + row * chunks * CHUNK + chunk * CHUNK + CHUNK - 1)
    # Exponents are added where an exponential is taken anyway.
    b_exponent, cb_exponent = 0.0, 0.0
    if d_exponents is not None:
        at = (row * tiles + tile) * N_GROUPS + group
        b_exponent = tl.load(B_exponents + at)
        cb_exponent = b_exponent + tl.load(C_exponents + at)
    same = tl.sum(b_tile.to(tl.float32) * c_tile.to(tl.float32), 1) * tl.exp2(0.0 + cb_exponent)
    if block == 0:
        tl.store(cb_diagonal + of_group * CHUNK + within + q, same)

    if KEEP_CB:
        pair_mask = q[:, None] < q[None, :]
        if seq_idx is not None:
            pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
        cb = tl.where(
            pair_mask, tl.dot(b_tile, tl.trans(c_tile), input_precision=PRECISION) * tl.exp2(0.0 + cb_exponent), 0.0
        )
        cb_exponent = 0.0
    dcb = tl.zeros((TILE, TILE), tl.float32)
    begin = group * HEADS_PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        found = ddA_terms + head * chunks * (3 * CHUNK) + q
        of_head = head * chunks * (2 * CHUNK)
        if USE_TMA:
            token, state_at = tl.program_id(2) * tokens + first, (tl.program_id(2) * chunks + chunk) * N_HEADS + head
            x_tile = x.load([token, head * HEAD_DIM])
            dy_tile = dy.load([token, head * HEAD_DIM])
            d_state = d_states.load([state_at * D_STATE, 0])
            if not STORE_TMA:
                x_tile = own_columns(x_tile, p, HEAD_DIM)
        else:
            x_tile = load_tile(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)
            dy_tile = load_tile(dy + head * dy_head, q, p, dy_token, seq_len, HEAD_DIM)
            d_state = load_tile(d_states + head * (D_STATE * HEAD_DIM), n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a, dt = tl.load(dA_cumsum + of_head + within + q), tl.load(dA_cumsum + of_head + CHUNK + within + q)
        a_end = tl.load(dA_cumsum + of_head + CHUNK - 1)
        state_exponent, highest = 0.0, 0.0
        if d_exponents is not None:
            state_exponent = load_exponents(
                d_exponents, (row * chunks + chunk) * N_HEADS + head, p, HEAD_DIM, EXPONENT_BLOCK
            )
            highest = tl.max(state_exponent) if HEAD_DIM > EXPONENT_BLOCK else state_exponent
        a_end += b_exponent + highest
        to_end = tl.exp2(a_end - a)
        later = q[None, :] + opaque_zero(a_end)
        if seq_idx is not None:
            to_end = tl.where(seq_idx_t == seq_idx_last, to_end, 0.0)

        d_pair = tl.dot(x_tile, tl.trans(dy_tile), input_precision=PRECISION)
        tl.store(found + 2 * CHUNK, tl.sum(tl.where(q[:, None] == later, d_pair, 0.0), 1))
        # B C^T is computed again for every head where registers are short: held over the loop it costs as many as dcb.
        if KEEP_CB:
            decay = tl.exp2(tl.minimum(a[None, :] - a[:, None], 0.0))
            decayed = (cb * decay).to(dy_tile.dtype)
            d_pair *= decay
            if dCB is not None:
                dcb += d_pair * dt[:, None]
            d_pair *= cb
        else:
            decay = tl.exp2((a + cb_exponent)[None, :] - a[:, None])  # overflows only where it is masked
            pair_mask = q[:, None] < later
            if seq_idx is not None:
                pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
            if dCB is not None:
                dcb += d_pair * decay * dt[:, None]  # masked, and divided by 2^cb_exponent, after the loop
            decayed = tl.where(pair_mask, tl.dot(b_tile, tl.trans(c_tile), input_precision=PRECISION) * decay, 0.0)
            d_pair *= decayed
        tl.store(found + CHUNK, tl.sum(d_pair, 1))
        tl.store(found, tl.sum(d_pair * dt[:, None], 0))
        u = tl.dot(b_tile, d_state, input_precision=PRECISION) * to_end[:, None]
        if d_exponents is not None and HEAD_DIM > EXPONENT_BLOCK:
            u *= tl.exp2(state_exponent - highest)
        u = tl.dot(decayed.to(dy_tile.dtype), dy_tile, acc=u, input_precision=PRECISION)
        # Where j = i nothing decays: in da the term cancels, and its rounding could be all that is left, so it is left out there.
        skip = load_skip(D, row, head, N_HEADS, first + q, tokens, HEAD_PARTS, TOKEN_SKIP)
        if TOKEN_SKIP:
            d_x = u * dt[:, None] + skip * dy_tile.to(tl.float32)
        else:
            on_dy = skip + same * dt
            d_x = u * dt[:, None] + on_dy[:, None] * dy_tile.to(tl.float32)
        if STORE_TMA:
            dx.store([token, head * HEAD_DIM], d_x.to(dx.dtype))
        else:
            to = q[:, None] * TOKEN_STRIDE + p[None, :]
            inside = (q < seq_len)[:, None] & (p < HEAD_DIM)[None, :]
            tl.store(dx + head * HEAD_DIM + to, d_x.to(dx.dtype.element_ty), mask=inside)

    if dCB is not None:
        if TOKEN_SKIP:
            pair_mask = q[:, None] < q[None, :]
        else:
            pair_mask = q[:, None] <= q[None, :]
        if seq_idx is not None:
            if KEEP_CB:  # loaded anew: over the loop it would cost registers
                seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + q)
            pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
        of_block = ((block * batch + row) * tiles + tile) * N_GROUPS + group
        dcb = tl.where(pair_mask, dcb * tl.exp2(-cb_exponent), 0.0).to(dCB.dtype.element_ty)
        tl.store(dCB + of_block * (TILE * TILE) + q[:, None] * TILE + q[None, :], dcb)
