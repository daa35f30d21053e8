"""Mamba-2's state-space duality in Triton, backward: the terms of the states before and after each chunk; dB and dC.

In the notation of intra_chunk_bwd.py: dC depends on the state before the chunk, S, and dB on the gradient of the state after
it, R. Either one program computes both, and reads S once; or, where d_state is so large that the sums over heads of both would
fill all registers, each has a launch of its own.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import jit
from llmtrain.kernels.ssd.block_scaled_fp16 import load_exponents, split_exponents
from llmtrain.kernels.ssd.head_blocks import empty_head_blocks, head_blocks, sum_head_blocks, token_stride
from llmtrain.kernels.ssd.state_passing import States
from llmtrain.kernels.ssd.triton_forward import load_tile, own_columns, padded, tma_descriptor
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

_SMALL_DSTATE = 64
"""Largest d_state for which one program computes both dB and dC."""


def inter_chunk_bwd(
    dy: Tensor, x: Tensor, B: Tensor, C: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, dCB: Tensor,
    dCB_halves: Tensor | None, states: States, ddA_terms: Tensor, chunk: int, tile: int, precision: str,
    launch: HeadLoopLaunch, num_sms: int, dB: Tensor | None = None, dC: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """dB, dC, 2^a_end S . R by parts of the states, [batch, chunks, parts, heads], and terms of ddA by blocks of d_state or None.

    dB and dC include the terms over pairs: dCB of intra_chunk_bwd, and dCB_halves of intra_chunk_halves_bwd if tiles are halves
    of chunks, by blocks of heads, whose number may differ from that of the blocks here. Adds to ddA_terms[..., 0, :], and writes
    after_j (see chunk_cumsum_bwd) into `dA_cumsum` in place of dt; or, where several programs share d_state, returns both by blocks
    of it. dB, dC: memory for them, slices of one tensor (see
    `token_stride`); None: allocated.
    """
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    chunks, tiles, dstate_blocks = dA_cumsum.shape[2], chunk // tile, launch.dstate_blocks
    rows = padded(d_state) // dstate_blocks
    # The tiles of a chunk share S . R where a part of the states is as wide as a product should be.
    parts = tiles if rows >= 64 * tiles else 1
    heads, blocks = head_blocks(x, n_groups, chunks * tiles * dstate_blocks, launch, num_sms)
    ddA_blocks = None
    if dstate_blocks > 1:
        ddA_blocks = torch.empty(
            (batch, n_heads, chunks, dstate_blocks, 2, chunk), dtype=torch.float32, device=x.device
        )
    ddA_state = torch.empty((batch, chunks, parts * dstate_blocks, n_heads), dtype=torch.float32, device=dy.device)
    dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) if d is None else d for t, d in ((B, dB), (C, dC)))
    strides = tuple(s for t in (dy, x, B, C) for s in t.stride()[:3])
    # A last chunk without a second tile would read that of the next sequence: only masked loads stop at its end.
    wanted = launch.use_tma and d_state == rows * dstate_blocks and seq_len % chunk == 0
    views = [tma_descriptor(wanted, t, tile, narrow=True) for t in (dy, x)]
    views += [tma_descriptor(wanted, t.view(1, -1, 1, head_dim), rows // parts, narrow=True) for t in states.values]
    use_tma = all(view is not None for view in views)
    dy, x, before, after = views if use_tma else (dy, x, *states.values)
    for compute_dB, compute_dC in (
        [(True, True)] if padded(d_state) <= _SMALL_DSTATE else [(True, False), (False, True)]
    ):
        into_B, into_C, token = dB, dC, token_stride(dB if compute_dB else dC)
        assert not (compute_dB and compute_dC) or token == token_stride(dC)
        if blocks > 1:  # sums of one block are final
            token = n_groups * d_state
            into_B, into_C = (
                empty_head_blocks(dB, blocks) if compute_dB else dB,
                empty_head_blocks(dC, blocks) if compute_dC else dC,
            )
        _inter_chunk_bwd[n_groups * blocks, chunks * tiles * dstate_blocks, batch](
            *(dy, x, B, C, dA_cumsum, seq_idx, dCB, dCB_halves, before, after),
            *split_exponents(states.exponents),
            *split_exponents(states.added_exponents),
            *(into_B, into_C, ddA_state, ddA_terms, ddA_blocks),
            *(seq_len, dCB.shape[0], 0 if dCB_halves is None else dCB_halves.shape[0], *strides),
            COMPUTE_DB=compute_dB,
            COMPUTE_DC=compute_dC,
            HEADS_PER_GROUP=n_heads // n_groups,
            N_HEADS=n_heads,
            HEAD_DIM=head_dim,
            D_STATE=d_state,
            CHUNK=chunk,
            TILE=tile,
            PARTS=parts,
            DSTATE_BLOCKS=dstate_blocks,
            BLOCK_DSTATE=rows // parts,
            BLOCK_HEADDIM=padded(head_dim),
            EXPONENT_BLOCK=states.block_headdim,
            HEADS_PER_PROGRAM=heads,
            TOKEN_STRIDE=token,
            USE_TMA=use_tma,
            PRECISION=precision,
            NUM_STAGES=launch.num_stages,
            **launch.options,
        )
        if blocks > 1 and compute_dB:
            sum_head_blocks(into_B, dB)
        if blocks > 1 and compute_dC:
            sum_head_blocks(into_C, dC)
    return dB, dC, ddA_state, ddA_blocks


@jit
def _inter_chunk_bwd(
    dy, x, B, C, dA_cumsum, seq_idx, dCB, dCB_halves, states, d_states,
    exponents, d_exponents, added_exponents, d_added_exponents, dB, dC, ddA_state, ddA_terms, ddA_blocks,
    seq_len, dCB_blocks, dCB_halves_blocks, dy_row, dy_token, dy_head, x_row, x_token, x_head,
    B_row, B_token, B_group, C_row, C_token, C_group, COMPUTE_DB: tl.constexpr, COMPUTE_DC: tl.constexpr,
    HEADS_PER_GROUP: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    CHUNK: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, DSTATE_BLOCKS: tl.constexpr,
    BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, EXPONENT_BLOCK: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile and block of d_state, row of the batch).

    The tiles of a chunk read the same states. If PARTS is 2, each of the two tiles sums S . R over its own half of their rows
    (`state`; the other half is `far_state`); else the first tile sums over all rows.
    """
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    TILES: tl.constexpr = CHUNK // TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    tile, dstate_block = tl.program_id(1) // DSTATE_BLOCKS, tl.program_id(1) % DSTATE_BLOCKS
    row = tl.program_id(2).to(tl.int64)
    tiles, batch = tl.num_programs(1) // DSTATE_BLOCKS, tl.num_programs(2)
    # The tiles of a chunk are neighbours: one finds in the L2 cache the states that the other has read.
    chunk, chunks, which = tile // TILES, tiles // TILES, tile % TILES
    first, within = tile * TILE, which * TILE
    part = which if PARTS == 2 else 0
    first_row = dstate_block * (PARTS * BLOCK_DSTATE)
    top, far_top = first_row + part * BLOCK_DSTATE, first_row + (1 - part) * BLOCK_DSTATE
    q, p = tl.arange(0, TILE), tl.arange(0, BLOCK_HEADDIM)
    n, far_n = top + tl.arange(0, BLOCK_DSTATE), far_top + tl.arange(0, BLOCK_DSTATE)

    if not USE_TMA:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        x += row * x_row + first.to(tl.int64) * x_token
        states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
        d_states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
    of_block = ((block * batch + row) * seq_len + first) * TOKEN_STRIDE + group * D_STATE
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)  # a_end is at the end of the chunk
    ddA_terms += (row * N_HEADS * chunks + chunk) * (3 * CHUNK) + within
    ddA_state += (((row * chunks + chunk) * DSTATE_BLOCKS + dstate_block) * PARTS + part) * N_HEADS
    tokens = seq_len
    seq_len -= first  # tokens from here on

    B += row * B_row + group * B_group + first.to(tl.int64) * B_token
    C += row * C_row + group * C_group + first.to(tl.int64) * C_token
    b_tile, c_tile = load_tile(B, q, n, B_token, seq_len, D_STATE), load_tile(C, q, n, C_token, seq_len, D_STATE)
    d_b, d_c = tl.zeros((TILE, BLOCK_DSTATE), tl.float32), tl.zeros((TILE, BLOCK_DSTATE), tl.float32)
    if PARTS == 2:
        far_b, far_c = (
            load_tile(B, q, far_n, B_token, seq_len, D_STATE),
            load_tile(C, q, far_n, C_token, seq_len, D_STATE),
        )
        d_far_b, d_far_c = tl.zeros((TILE, BLOCK_DSTATE), tl.float32), tl.zeros((TILE, BLOCK_DSTATE), tl.float32)
    seq_idx_t, seq_idx_last = None, None
    if seq_idx is not None:
        seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + q)
        seq_idx_last = tl.load(seq_idx + row * chunks * CHUNK + chunk * CHUNK + CHUNK - 1)

    # Each block of heads takes dCB of its share of the blocks there. A last chunk may have no second tile of dCB.
    tiles_of_dCB = (tokens + TILE - 1) // TILE
    for other in range(block, tl.where(seq_len > 0, dCB_blocks, 0), BLOCKS):
        dCB_at = dCB + (((other * batch + row) * tiles_of_dCB + tile) * N_GROUPS + group) * (TILE * TILE)
        dcb = tl.load(dCB_at + q[:, None] * TILE + q[None, :])
        if COMPUTE_DB:
            d_b += tl.dot(dcb, c_tile, input_precision=PRECISION)
            if PARTS == 2:
                d_far_b += tl.dot(dcb, far_c, input_precision=PRECISION)
        if COMPUTE_DC:
            d_c += tl.dot(tl.trans(dcb), b_tile, input_precision=PRECISION)
            if PARTS == 2:
                d_far_c += tl.dot(tl.trans(dcb), far_b, input_precision=PRECISION)
    if dCB_halves is not None:
        # B of the first half and C of the second: the gradient of each needs the other. Where a sequence ends in the first
        # half, the second reads nothing: its loads of B stop at the half, not at the end of the sequence.
        for other in range(block, tl.where(seq_len > 0, dCB_halves_blocks, 0), BLOCKS):
            dCB_at = dCB_halves + (((other * batch + row) * chunks + chunk) * N_GROUPS + group) * (TILE * TILE)
            dcb = tl.load(dCB_at + q[:, None] * TILE + q[None, :])
            if COMPUTE_DB and which == 0:
                at, left = C + TILE * C_token, seq_len - TILE
                d_b += tl.dot(dcb, load_tile(at, q, n, C_token, left, D_STATE), input_precision=PRECISION)
                if PARTS == 2:
                    d_far_b += tl.dot(dcb, load_tile(at, q, far_n, C_token, left, D_STATE), input_precision=PRECISION)
            if COMPUTE_DC and which == 1:
                at, dcb = B - TILE * B_token, tl.trans(dcb)
                d_c += tl.dot(dcb, load_tile(at, q, n, B_token, TILE, D_STATE), input_precision=PRECISION)
                if PARTS == 2:
                    d_far_c += tl.dot(dcb, load_tile(at, q, far_n, B_token, TILE, D_STATE), input_precision=PRECISION)
    begin = group * HEADS_PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_head = head * chunks * (2 * CHUNK)
        # dB needs S too, for S . R.
        if USE_TMA:
            token, at = (
                tl.program_id(2) * tokens + first,
                ((tl.program_id(2) * chunks + chunk) * N_HEADS + head) * D_STATE,
            )
            state = states.load([at + top, 0])
            if COMPUTE_DB:
                x_tile = x.load([token, head * HEAD_DIM])
                if HEAD_DIM < BLOCK_HEADDIM:
                    x_tile = own_columns(x_tile, p, HEAD_DIM)
                d_state = d_states.load([at + top, 0])
                if PARTS == 2:
                    far_d_state = d_states.load([at + far_top, 0])
            if COMPUTE_DC:
                dy_tile = dy.load([token, head * HEAD_DIM])
                if HEAD_DIM < BLOCK_HEADDIM:
                    dy_tile = own_columns(dy_tile, p, HEAD_DIM)
                if PARTS == 2:
                    far_state = states.load([at + far_top, 0])
        else:
            at = head * (D_STATE * HEAD_DIM)
            state = load_tile(states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
            if COMPUTE_DB:
                x_tile = load_tile(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)
                d_state = load_tile(d_states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
                if PARTS == 2:
                    far_d_state = load_tile(d_states + at, far_n, p, HEAD_DIM, D_STATE, HEAD_DIM)
            if COMPUTE_DC:
                dy_tile = load_tile(dy + head * dy_head, q, p, dy_token, seq_len, HEAD_DIM)
                if PARTS == 2:
                    far_state = load_tile(states + at, far_n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a = tl.load(dA_cumsum + of_head + within + q)
        state_exponent, d_state_exponent, x_exponent, dy_exponent = 0.0, 0.0, 0.0, 0.0
        if exponents is not None:
            of_chunk, of_tile = (row * chunks + chunk) * N_HEADS + head, (row * tiles + tile) * N_HEADS + head
            state_exponent = load_exponents(exponents, of_chunk, p, HEAD_DIM, EXPONENT_BLOCK)
            if COMPUTE_DB:
                d_state_exponent = load_exponents(d_exponents, of_chunk, p, HEAD_DIM, EXPONENT_BLOCK)
                x_exponent = d_state_exponent + load_exponents(added_exponents, of_tile, p, HEAD_DIM, EXPONENT_BLOCK)
                if HEAD_DIM > EXPONENT_BLOCK:
                    x_exponent = tl.max(x_exponent)
                x_tile = (x_tile.to(tl.float32) * tl.exp2(d_state_exponent - x_exponent)).to(tl.float16)
            if COMPUTE_DC:
                dy_exponent = state_exponent + load_exponents(d_added_exponents, of_tile, p, HEAD_DIM, EXPONENT_BLOCK)
                if HEAD_DIM > EXPONENT_BLOCK:
                    dy_exponent = tl.max(dy_exponent)
                dy_tile = (dy_tile.to(tl.float32) * tl.exp2(state_exponent - dy_exponent)).to(tl.float16)
        if COMPUTE_DB:
            dt_at = dA_cumsum + of_head + CHUNK + within + q
            dt, a_end = tl.load(dt_at), tl.load(dA_cumsum + of_head + CHUNK - 1)
            kept = state.to(tl.float32) * d_state.to(tl.float32) * tl.exp2(a_end + (state_exponent + d_state_exponent))
            to_end = tl.exp2(a_end - a + x_exponent)
            if seq_idx is not None:
                kept = tl.where(seq_idx_last == 0, kept, 0.0)
                to_end = tl.where(seq_idx_t == seq_idx_last, to_end, 0.0)
            tl.store(ddA_state + head, tl.sum(tl.sum(kept, 1), 0), mask=which < PARTS)
            taken = tl.dot(x_tile, tl.trans(d_state), input_precision=PRECISION)
            after = tl.sum(taken * b_tile.to(tl.float32), 1)
            d_b += taken * (to_end * dt)[:, None]
            if PARTS == 2:
                taken = tl.dot(x_tile, tl.trans(far_d_state), input_precision=PRECISION)
                after += tl.sum(taken * far_b.to(tl.float32), 1)
                d_far_b += taken * (to_end * dt)[:, None]
            into = dt_at  # in place of dt, which nothing reads any more
            if DSTATE_BLOCKS > 1:
                at = ((row * N_HEADS + head) * chunks + chunk) * DSTATE_BLOCKS + dstate_block
                into = ddA_blocks + at * (2 * CHUNK) + within + q
            tl.store(into, after * to_end)
        if COMPUTE_DC:
            from_start = tl.exp2(a + dy_exponent)
            if seq_idx is not None:
                from_start = tl.where(seq_idx_t == 0, from_start, 0.0)
            carried = tl.dot(dy_tile, tl.trans(state), input_precision=PRECISION)
            earlier = tl.sum(carried * c_tile.to(tl.float32), 1)
            d_c += carried * from_start[:, None]
            if PARTS == 2:
                carried = tl.dot(dy_tile, tl.trans(far_state), input_precision=PRECISION)
                earlier += tl.sum(carried * far_c.to(tl.float32), 1)
                d_far_c += carried * from_start[:, None]
            if DSTATE_BLOCKS > 1:
                at = ((row * N_HEADS + head) * chunks + chunk) * DSTATE_BLOCKS + dstate_block
                tl.store(ddA_blocks + at * (2 * CHUNK) + CHUNK + within + q, earlier * from_start)
            else:
                found = ddA_terms + head * chunks * (3 * CHUNK) + q
                tl.store(found, tl.load(found) + earlier * from_start)

    to = of_block + q[:, None] * TOKEN_STRIDE + n[None, :]
    far_to, inside = to + (far_top - top), (q < seq_len)[:, None] & (n < D_STATE)[None, :]
    far_inside = (q < seq_len)[:, None] & (far_n < D_STATE)[None, :]
    if COMPUTE_DB:
        tl.store(dB + to, d_b.to(dB.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(dB + far_to, d_far_b.to(dB.dtype.element_ty), mask=far_inside)
    if COMPUTE_DC:
        tl.store(dC + to, d_c.to(dC.dtype.element_ty), mask=inside)
        if PARTS == 2:
            tl.store(dC + far_to, d_far_c.to(dC.dtype.element_ty), mask=far_inside)
