"""Gradients of Mamba-3's rotated queries and keys and of their angles, with what the states before and after a chunk add to those
of decays.

What ssd/inter_chunk_bwd.py computes of B and C, in its notation, but for heads of which each has its own: then nothing is summed
over heads, one program has both gradients, and the products of pairs are taken anew where x and dy are read anyway. An angle's
gradient is what is left of sums over all later tokens, of which the largest part cancels: so it is made here of both gradients
before they are rounded, and of q and k as the scan's products have them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.block_scaled_fp16 import ScaledBC, exponent_of, load_exponents, split_exponents
from llmtrain.kernels.ssd.state_passing import States
from llmtrain.kernels.ssd.triton_forward import load_tile, own_columns, padded, tma_descriptor
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

_HEADS_PER_PROGRAM = 8
_ROWS = 64
"""Rows of d_state of a program, at most: two gradients of twice as many do not fit into registers."""


def keys_bwd(
    dy: Tensor, x: Tensor, kq: ScaledBC, dA_cumsum: Tensor, seq_idx: Tensor | None, states: States, ddA_terms: Tensor,
    angles: int, chunk: int, precision: str, launch: HeadLoopLaunch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Gradients of rotated q and k, [batch, T, heads, d_state] in the dtype of x; of angles, [batch, T, heads, angles] in fp32; and
    ddA_state and ddA_blocks as inter_chunk_bwd returns them. Adds to ddA_terms and dA_cumsum what inter_chunk_bwd adds.

    dy, x: [batch, T, parts of heads, head_dim]; kq: rotated k and q, scaled by chunks.
    """
    batch, seq_len, n_heads, head_dim = x.shape
    heads, d_state = kq.B.shape[2:]
    chunks, blocks = dA_cumsum.shape[2], max(launch.dstate_blocks, padded(d_state) // _ROWS)
    wide = {"dtype": torch.float32, "device": x.device}
    ddA_blocks = torch.empty((batch, n_heads, chunks, blocks, 2, chunk), **wide) if blocks > 1 else None
    ddA_state = torch.empty((batch, chunks, blocks, n_heads), **wide)
    dk, dq = (torch.empty(kq.B.shape, dtype=x.dtype, device=x.device) for _ in range(2))
    d_angles = torch.empty((batch, seq_len, heads, angles), **wide)
    rows = padded(d_state) // blocks
    wanted = launch.use_tma and d_state == rows * blocks and seq_len % chunk == 0
    views = [tma_descriptor(wanted, t, chunk, narrow=True) for t in (dy, x)]
    views += [tma_descriptor(wanted, t, chunk, rows) for t in kq[:2]]
    views += [tma_descriptor(wanted, t.view(1, -1, 1, head_dim), rows, narrow=True) for t in states.values]
    use_tma = all(view is not None for view in views)
    of_program = min(_HEADS_PER_PROGRAM, heads)
    _keys_bwd[cdiv(heads, of_program) * blocks, cdiv(seq_len, chunk), batch](
        *(views if use_tma else (dy, x, kq.B, kq.C, *states.values)),
        *(*split_exponents(kq.exponents), dA_cumsum, seq_idx),
        *(*split_exponents(states.exponents), *split_exponents(states.added_exponents)),
        *(dk, dq, d_angles, ddA_state, ddA_terms, ddA_blocks, seq_len, chunks),
        *(stride for t in (dy, x, kq.B, kq.C) for stride in t.stride()[:3]),
        HEAD_PARTS=n_heads // heads,
        N_HEADS=n_heads,
        HEADS_PER_PROGRAM=of_program,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        ANGLES=angles,
        CHUNK=chunk,
        DSTATE_BLOCKS=blocks,
        BLOCK_DSTATE=rows,
        BLOCK_HEADDIM=padded(head_dim),
        EXPONENT_BLOCK=states.block_headdim,
        USE_TMA=use_tma,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages if n_heads == heads else 1,
        **launch.options,
    )
    return dq, dk, d_angles, ddA_state, ddA_blocks


@triton.jit
def _turned(keys, d_keys):
    """Gradients of angles, [tokens, pairs], by those of rotated pairs of channels, [tokens, 2 * pairs]."""
    a, b = tl.split(keys.to(tl.float32).reshape(keys.shape[0], keys.shape[1] // 2, 2))
    d_a, d_b = tl.split(d_keys.reshape(keys.shape[0], keys.shape[1] // 2, 2))
    return a * d_b - b * d_a


@jit
def _keys_bwd(
    dy, x, k, q, states, d_states, k_exponents, q_exponents, dA_cumsum, seq_idx,
    exponents, d_exponents, added_exponents, d_added_exponents, dk, dq, d_angles, ddA_state, ddA_terms, ddA_blocks,
    seq_len, chunks, dy_row, dy_token, dy_head, x_row, x_token, x_head, k_row, k_token, k_head, q_row, q_token, q_head,
    HEAD_PARTS: tl.constexpr, N_HEADS: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr, ANGLES: tl.constexpr, CHUNK: tl.constexpr, DSTATE_BLOCKS: tl.constexpr, BLOCK_DSTATE: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr, EXPONENT_BLOCK: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (heads and block of d_state, chunk, row of the batch). Matrices over pairs are [j, i], j < i."""
    HEADS: tl.constexpr = N_HEADS // HEAD_PARTS
    begin, block = tl.program_id(0) // DSTATE_BLOCKS * HEADS_PER_PROGRAM, tl.program_id(0) % DSTATE_BLOCKS
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    first, top = chunk * CHUNK, block * BLOCK_DSTATE
    t, p, c = tl.arange(0, CHUNK), tl.arange(0, BLOCK_HEADDIM), tl.arange(0, BLOCK_DSTATE)
    n, i = top + c, top // 2 + tl.arange(0, BLOCK_DSTATE // 2)
    of_chunk, first_token, tokens = (row * chunks + chunk) * N_HEADS, row * seq_len + first, seq_len - first
    inside, turning = (t < tokens)[:, None] & (n < D_STATE)[None, :], (t < tokens)[:, None] & (i < ANGLES)[None, :]
    token, of_state = tl.program_id(2) * seq_len + first, (tl.program_id(2) * chunks + chunk) * N_HEADS
    if not USE_TMA:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        x += row * x_row + first.to(tl.int64) * x_token
        k += row * k_row + first.to(tl.int64) * k_token + top
        q += row * q_row + first.to(tl.int64) * q_token + top
        states += of_chunk * (D_STATE * HEAD_DIM) + top * HEAD_DIM
        d_states += of_chunk * (D_STATE * HEAD_DIM) + top * HEAD_DIM
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    ddA_terms += (row * N_HEADS * chunks + chunk) * (3 * CHUNK)
    ddA_state += ((row * chunks + chunk) * DSTATE_BLOCKS + block) * N_HEADS
    if DSTATE_BLOCKS > 1:
        ddA_blocks += ((row * N_HEADS * chunks + chunk) * DSTATE_BLOCKS + block) * (2 * CHUNK)
    dk += first_token * (HEADS * D_STATE) + top
    dq += first_token * (HEADS * D_STATE) + top
    d_angles += first_token * (HEADS * ANGLES)
    to, to_angles = t[:, None] * (HEADS * D_STATE) + c[None, :], t[:, None] * (HEADS * ANGLES) + i[None, :]
    pair_mask = t[:, None] < t[None, :]
    if seq_idx is not None:
        seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + t)
        seq_idx_last = tl.load(seq_idx + row * chunks * CHUNK + first + CHUNK - 1)
        pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])

    for head in tl.range(begin, tl.minimum(begin + HEADS_PER_PROGRAM, HEADS), num_stages=NUM_STAGES):
        if USE_TMA:
            k_tile, q_tile = k.load([token, head * D_STATE + top]), q.load([token, head * D_STATE + top])
        else:
            k_tile = load_tile(k + head * k_head, t, c, k_token, tokens, D_STATE - top)
            q_tile = load_tile(q + head * q_head, t, c, q_token, tokens, D_STATE - top)
        k_exponent, q_exponent, pairs_exponent = 0.0, 0.0, 0.0
        if k_exponents is not None:
            k_exponent = tl.load(k_exponents + (row * chunks + chunk) * HEADS + head)
            q_exponent = tl.load(q_exponents + (row * chunks + chunk) * HEADS + head)
        pairs = tl.zeros((CHUNK, CHUNK), tl.float32)
        for part in tl.static_range(HEAD_PARTS):
            one = head * HEAD_PARTS + part
            if USE_TMA:
                x_tile, dy_tile = x.load([token, one * HEAD_DIM]), dy.load([token, one * HEAD_DIM])
                if HEAD_DIM < BLOCK_HEADDIM:
                    x_tile, dy_tile = own_columns(x_tile, p, HEAD_DIM), own_columns(dy_tile, p, HEAD_DIM)
            else:
                x_tile = load_tile(x + one * x_head, t, p, x_token, tokens, HEAD_DIM)
                dy_tile = load_tile(dy + one * dy_head, t, p, dy_token, tokens, HEAD_DIM)
            of_head = dA_cumsum + one * chunks * (2 * CHUNK) + t
            a, weight = tl.load(of_head), tl.load(of_head + CHUNK)
            decay = tl.exp2(tl.minimum(a[None, :] - a[:, None], 0.0)) * weight[:, None]
            pairs += tl.dot(x_tile, tl.trans(dy_tile), input_precision=PRECISION) * decay
        pairs = tl.where(pair_mask, pairs, 0.0)
        if k_exponents is not None:
            pairs_exponent = exponent_of(tl.max(tl.abs(pairs)))
            pairs *= tl.exp2(-pairs_exponent)
        pairs = pairs.to(k_tile.dtype)

        d_k = tl.dot(pairs, q_tile, input_precision=PRECISION) * tl.exp2(q_exponent + pairs_exponent)
        for part in tl.static_range(HEAD_PARTS):
            one = head * HEAD_PARTS + part
            if USE_TMA:
                if HEAD_PARTS > 1:
                    x_tile = x.load([token, one * HEAD_DIM])
                    if HEAD_DIM < BLOCK_HEADDIM:
                        x_tile = own_columns(x_tile, p, HEAD_DIM)
                state = states.load([(of_state + one) * D_STATE + top, 0])
                d_state = d_states.load([(of_state + one) * D_STATE + top, 0])
            else:
                if HEAD_PARTS > 1:
                    x_tile = load_tile(x + one * x_head, t, p, x_token, tokens, HEAD_DIM)
                state = load_tile(states + one * (D_STATE * HEAD_DIM), c, p, HEAD_DIM, D_STATE - top, HEAD_DIM)
                d_state = load_tile(d_states + one * (D_STATE * HEAD_DIM), c, p, HEAD_DIM, D_STATE - top, HEAD_DIM)
            of_head = dA_cumsum + one * chunks * (2 * CHUNK)
            a, weight, a_end = tl.load(of_head + t), tl.load(of_head + CHUNK + t), tl.load(of_head + CHUNK - 1)
            exponent, x_exponent = 0.0, 0.0
            if exponents is not None:
                exponent = load_exponents(d_exponents, of_chunk + one, p, HEAD_DIM, EXPONENT_BLOCK)
                x_exponent = exponent + load_exponents(added_exponents, of_chunk + one, p, HEAD_DIM, EXPONENT_BLOCK)
                if HEAD_DIM > EXPONENT_BLOCK:
                    x_exponent = tl.max(x_exponent)
                x_tile = (x_tile.to(tl.float32) * tl.exp2(exponent - x_exponent)).to(tl.float16)
                exponent += load_exponents(exponents, of_chunk + one, p, HEAD_DIM, EXPONENT_BLOCK)
            kept = state.to(tl.float32) * d_state.to(tl.float32) * tl.exp2(a_end + exponent)
            to_end = tl.exp2(a_end - a + x_exponent)
            if seq_idx is not None:
                kept = tl.where(seq_idx_last == 0, kept, 0.0)
                to_end = tl.where(seq_idx_t == seq_idx_last, to_end, 0.0)
            tl.store(ddA_state + one, tl.sum(tl.sum(kept, 1), 0))
            taken = tl.dot(x_tile, tl.trans(d_state), input_precision=PRECISION) * to_end[:, None]
            d_k += taken * weight[:, None]
            into = of_head + CHUNK + t  # in place of the weight, which nothing reads any more
            if DSTATE_BLOCKS > 1:
                into = ddA_blocks + one * chunks * (DSTATE_BLOCKS * 2 * CHUNK) + t
            tl.store(into, tl.sum(taken * k_tile.to(tl.float32), 1) * tl.exp2(0.0 + k_exponent))
        tl.store(dk + head * D_STATE + to, d_k.to(dk.dtype.element_ty), mask=inside)
        turned = _turned(k_tile, d_k) * tl.exp2(0.0 + k_exponent)

        d_q = tl.dot(tl.trans(pairs), k_tile, input_precision=PRECISION) * tl.exp2(k_exponent + pairs_exponent)
        for part in tl.static_range(HEAD_PARTS):
            one = head * HEAD_PARTS + part
            if HEAD_PARTS > 1:
                if USE_TMA:
                    state = states.load([(of_state + one) * D_STATE + top, 0])
                    dy_tile = dy.load([token, one * HEAD_DIM])
                    if HEAD_DIM < BLOCK_HEADDIM:
                        dy_tile = own_columns(dy_tile, p, HEAD_DIM)
                else:
                    state = load_tile(states + one * (D_STATE * HEAD_DIM), c, p, HEAD_DIM, D_STATE - top, HEAD_DIM)
                    dy_tile = load_tile(dy + one * dy_head, t, p, dy_token, tokens, HEAD_DIM)
            a, dy_exponent = tl.load(dA_cumsum + one * chunks * (2 * CHUNK) + t), 0.0
            if exponents is not None:
                exponent = load_exponents(exponents, of_chunk + one, p, HEAD_DIM, EXPONENT_BLOCK)
                dy_exponent = exponent + load_exponents(d_added_exponents, of_chunk + one, p, HEAD_DIM, EXPONENT_BLOCK)
                if HEAD_DIM > EXPONENT_BLOCK:
                    dy_exponent = tl.max(dy_exponent)
                dy_tile = (dy_tile.to(tl.float32) * tl.exp2(exponent - dy_exponent)).to(tl.float16)
            from_start = tl.exp2(a + dy_exponent)
            if seq_idx is not None:
                from_start = tl.where(seq_idx_t == 0, from_start, 0.0)
            carried = tl.dot(dy_tile, tl.trans(state), input_precision=PRECISION) * from_start[:, None]
            d_q += carried
            earlier = tl.sum(carried * q_tile.to(tl.float32), 1) * tl.exp2(0.0 + q_exponent)
            if DSTATE_BLOCKS > 1:
                tl.store(ddA_blocks + one * chunks * (DSTATE_BLOCKS * 2 * CHUNK) + CHUNK + t, earlier)
            else:
                found = ddA_terms + one * chunks * (3 * CHUNK) + t
                tl.store(found, tl.load(found) + earlier)
        tl.store(dq + head * D_STATE + to, d_q.to(dq.dtype.element_ty), mask=inside)
        turned += _turned(q_tile, d_q) * tl.exp2(0.0 + q_exponent)
        tl.store(d_angles + head * ANGLES + to_angles, turned, mask=turning)
