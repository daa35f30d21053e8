"""All gradients of a chunk of the scan in one kernel, where each head has q and k of its own.

In the notation of ssd/intra_chunk_bwd.py, B and C being rotated k and q, and a chunk being one tile. Nothing is summed over
heads, so nothing but inputs and gradients passes through memory. The kernels of shared B and C would write the gradient of C B^T
of every head, and read B, C, x, dy and the states two or three times.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.block_scaled_fp16 import ScaledBC, exponent_of, split_exponents
from llmtrain.kernels.ssd.state_passing import States, state_passing_bwd
from llmtrain.kernels.ssd.triton_forward import load_tile, opaque_zero, padded, tma_descriptor
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch, Launch


def launch_for(launch: Launch, head_dim: int) -> HeadLoopLaunch | None:
    """Launch of the kernel here, or None where those of shared B and C serve: a head is split, or its states are passed in
    parts of its columns."""
    passing = (launch.state_passing_bwd, launch.state_passing_bwd_wide or launch.state_passing_bwd)
    whole = launch.head_parts(head_dim) == 1 and all(one.block_headdim >= padded(head_dim) for one in passing)
    return launch.own_chunk_bwd if whole else None


def scan_gradients(
    dy: Tensor, d_final: Tensor | None, v: Tensor, k: Tensor, q: Tensor, exponents: Tensor | None, skip: Tensor, dA_cumsum: Tensor,
    largest: Tensor | None, seq_idx: Tensor | None, h: Tensor | None, launch: Launch, own: HeadLoopLaunch, into: Sequence[Tensor],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write the gradients of v, k, q, and of the initial state h if there is one; return the terms and ddA_state of `chunk_bwd`.
    k, q: rotated; exponents: [2, heads], of k and q in fp16."""
    dv, dk, dq, d_h = into
    chunk, precision, (batch, seq_len, n_heads, head_dim) = launch.tile, launch.input_precision, v.shape
    dy, v = (t if t.stride(3) == 1 else t.contiguous() for t in (dy, v))
    h, d_final = (None if t is None else t.float().contiguous() for t in (h, d_final))
    if exponents is not None:
        exponents = exponents[:, None, None].expand(2, batch, cdiv(seq_len, chunk), n_heads).contiguous()
    bc, passing = ScaledBC(k, q, exponents), launch.state_passing_bwd_for(batch * n_heads, k.shape[3], head_dim)
    ends = (h, d_final, None if h is None else d_h)
    states = state_passing_bwd(v, dy, bc, dA_cumsum, largest, seq_idx, *ends, chunk, chunk, precision, passing)
    return chunk_bwd(dy, v, bc, skip, dA_cumsum, seq_idx, states, chunk, precision, own, launch.num_sms, dv, dk, dq)


def chunk_bwd(
    dy: Tensor, v: Tensor, bc: ScaledBC, skip: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, states: States, chunk: int,
    precision: str, launch: HeadLoopLaunch, num_sms: int, dv: Tensor, dk: Tensor, dq: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write dv, like v, and dk and dq, [batch, T, heads, d_state] in fp32, all contiguous.

    Returns ddA_terms, [batch, heads, chunks, 3, chunk], and ddA_state, [batch, chunks, 1, heads], and changes `dA_cumsum`, as
    decays_bwd takes them. skip: [batch, heads, T]; states: with all columns in one part.
    """
    batch, seq_len, n_heads, head_dim = v.shape
    d_state, chunks = bc.B.shape[3], dA_cumsum.shape[2]
    heads = launch.heads(n_heads, batch * chunks, num_sms)
    wide = {"dtype": torch.float32, "device": v.device}
    ddA_terms = torch.empty((batch, n_heads, chunks, 3, chunk), **wide)
    ddA_state = torch.empty((batch, chunks, 1, n_heads), **wide)
    wanted = launch.use_tma and d_state == padded(d_state)
    views = [tma_descriptor(wanted, t, chunk) for t in (dy, v, bc.B, bc.C)]
    views += [tma_descriptor(wanted, t.view(1, -1, 1, head_dim), d_state) for t in states.values]
    use_tma = all(view is not None for view in views)
    tiles = views if use_tma else (dy, v, bc.B, bc.C, *states.values)
    _chunk_bwd[cdiv(n_heads, heads), chunks, batch](
        *(*tiles, *split_exponents(bc.exponents), skip, dA_cumsum, seq_idx),
        *(*split_exponents(states.exponents), *split_exponents(states.added_exponents)),
        *(dv, dk, dq, ddA_terms, ddA_state, seq_len, *dy.stride()[:3], *v.stride()[:3]),
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        BLOCK_DSTATE=padded(d_state),
        BLOCK_HEADDIM=padded(head_dim),
        HEADS_PER_PROGRAM=heads,
        USE_TMA=use_tma,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )
    return ddA_terms, ddA_state


@jit
def _chunk_bwd(
    dy, v, B, C, states, d_states, B_exponents, C_exponents, skip, dA_cumsum, seq_idx,
    exponents, d_exponents, added_exponents, d_added_exponents, dv, dB, dC, ddA_terms, ddA_state,
    seq_len, dy_row, dy_token, dy_head, v_row, v_token, v_head,
    N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_DSTATE: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, chunk, row of the batch). Matrices over pairs are [j, i], j < i."""
    chunk, chunks, row = tl.program_id(1), tl.num_programs(1), tl.program_id(2).to(tl.int64)
    first = chunk * CHUNK
    q, n, p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_DSTATE), tl.arange(0, BLOCK_HEADDIM)
    of_chunk, first_token = (row * chunks + chunk) * N_HEADS, row * seq_len + first
    if not USE_TMA:
        dy += row * dy_row + first.to(tl.int64) * dy_token
        v += row * v_row + first.to(tl.int64) * v_token
        B += first_token * (N_HEADS * D_STATE)
        C += first_token * (N_HEADS * D_STATE)
        states += of_chunk * (D_STATE * HEAD_DIM)
        d_states += of_chunk * (D_STATE * HEAD_DIM)
    dv += first_token * (N_HEADS * HEAD_DIM)
    dB += first_token * (N_HEADS * D_STATE)
    dC += first_token * (N_HEADS * D_STATE)
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    ddA_terms += (row * N_HEADS * chunks + chunk) * (3 * CHUNK)
    skip += row * N_HEADS * seq_len + first
    tokens = seq_len
    seq_len -= first  # tokens from here on
    inside = (q < seq_len)[:, None]

    begin = tl.program_id(0) * HEADS_PER_PROGRAM
    for head in tl.range(begin, tl.minimum(begin + HEADS_PER_PROGRAM, N_HEADS), num_stages=NUM_STAGES):
        of_head, found = dA_cumsum + head * chunks * (2 * CHUNK), ddA_terms + head * chunks * (3 * CHUNK) + q
        if USE_TMA:
            token = tl.program_id(2) * tokens + first
            below = ((tl.program_id(2) * chunks + chunk) * N_HEADS + head) * D_STATE
            x, up = v.load([token, head * HEAD_DIM]), dy.load([token, head * HEAD_DIM])
            b, c = B.load([token, head * D_STATE]), C.load([token, head * D_STATE])
            state, d_state = states.load([below, 0]), d_states.load([below, 0])
        else:
            at, token = head * (D_STATE * HEAD_DIM), N_HEADS * D_STATE
            x = load_tile(v + head * v_head, q, p, v_token, seq_len, HEAD_DIM)
            up = load_tile(dy + head * dy_head, q, p, dy_token, seq_len, HEAD_DIM)
            b = load_tile(B + head * D_STATE, q, n, token, seq_len, D_STATE)
            c = load_tile(C + head * D_STATE, q, n, token, seq_len, D_STATE)
            state = load_tile(states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
            d_state = load_tile(d_states + at, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a, dt, a_end = tl.load(of_head + q), tl.load(of_head + CHUNK + q), tl.load(of_head + CHUNK - 1)
        factor = tl.load(skip + head * tokens + q, mask=q < seq_len, other=0.0)
        none = a_end * 0.0
        b_exponent, c_exponent, state_exponent, d_state_exponent, x_exponent, up_exponent = (
            none,
            none,
            none,
            none,
            none,
            none,
        )
        if exponents is not None:
            at = of_chunk + head
            b_exponent, c_exponent = tl.load(B_exponents + at), tl.load(C_exponents + at)
            state_exponent, d_state_exponent = tl.load(exponents + at), tl.load(d_exponents + at)
            x_exponent, up_exponent = tl.load(added_exponents + at), tl.load(d_added_exponents + at)
        after_end, from_start = tl.exp2(a_end - a), tl.exp2(a)
        i = q[None, :] + opaque_zero(a_end)
        pairs = q[:, None] < i
        kept = tl.exp2(a_end + state_exponent + d_state_exponent)
        if seq_idx is not None:
            at = seq_idx + row * chunks * CHUNK + first
            document, last = tl.load(at + q), tl.load(at + CHUNK - 1)
            after_end = tl.where(document == last, after_end, 0.0)
            from_start = tl.where(document == 0, from_start, 0.0)
            pairs = pairs & (document[:, None] == document[None, :])
            kept = tl.where(last == 0, kept, 0.0)
        tl.store(ddA_state + of_chunk + head, tl.sum(state.to(tl.float32) * d_state.to(tl.float32)) * kept)

        d_pair = tl.dot(x, tl.trans(up), input_precision=PRECISION)
        tl.store(found + 2 * CHUNK, tl.sum(tl.where(q[:, None] == i, d_pair, 0.0), 1))
        decay = tl.where(pairs, tl.exp2(a[None, :] - a[:, None]), 0.0)
        d_pair *= decay
        # No power of two below makes a product with the states overflow that is added to.
        least = tl.maximum(x_exponent + d_state_exponent - c_exponent, up_exponent + state_exponent - b_exponent) - 26.0
        d_score, d_exponent = _scaled(d_pair * dt[:, None], least, exponents, x.dtype)
        scores = tl.dot(b, tl.trans(c), input_precision=PRECISION) * tl.exp2(b_exponent + c_exponent)
        d_pair *= scores
        tl.store(found + CHUNK, tl.sum(d_pair, 1))
        earlier = tl.sum(d_pair * dt[:, None], 0)
        scores = (scores * decay).to(up.dtype)
        u = tl.dot(b, d_state, input_precision=PRECISION)
        u *= (after_end * tl.exp2(b_exponent + d_state_exponent))[:, None]
        u = tl.dot(scores, up, acc=u, input_precision=PRECISION)
        d_x = u * dt[:, None] + factor[:, None] * up.to(tl.float32)
        to = q[:, None] * (N_HEADS * HEAD_DIM) + p[None, :]
        tl.store(dv + head * HEAD_DIM + to, d_x.to(dv.dtype.element_ty), mask=inside & (p < HEAD_DIM)[None, :])

        to, written = q[:, None] * (N_HEADS * D_STATE) + n[None, :], inside & (n < D_STATE)[None, :]
        # What is taken from the chunk's end to b, and brought from its start to c.
        d_b = tl.dot(_down(x, x_exponent, exponents), tl.trans(d_state), input_precision=PRECISION)
        weight = after_end * tl.exp2(x_exponent + d_state_exponent)
        tl.store(
            of_head + CHUNK + q, tl.sum(d_b * b.to(tl.float32), 1) * weight * tl.exp2(b_exponent)
        )  # in place of dt
        d_b *= (weight * dt * tl.exp2(-c_exponent - d_exponent))[:, None]
        d_b = tl.dot(d_score, c, acc=d_b, input_precision=PRECISION) * tl.exp2(c_exponent + d_exponent)
        tl.store(dB + head * D_STATE + to, d_b, mask=written)
        d_c = tl.dot(_down(up, up_exponent, exponents), tl.trans(state), input_precision=PRECISION)
        weight = from_start * tl.exp2(up_exponent + state_exponent)
        tl.store(found, earlier + tl.sum(d_c * c.to(tl.float32), 1) * weight * tl.exp2(c_exponent))
        d_c *= (weight * tl.exp2(-b_exponent - d_exponent))[:, None]
        d_c = tl.dot(tl.trans(d_score), b, acc=d_c, input_precision=PRECISION) * tl.exp2(b_exponent + d_exponent)
        tl.store(dC + head * D_STATE + to, d_c, mask=written)


@triton.jit
def _down(x, exponent, exponents):
    """Quotient of x by 2^exponent in fp16, if there are exponents."""
    if exponents is not None:
        x = (x.to(tl.float32) * tl.exp2(-exponent)).to(tl.float16)
    return x


@triton.jit
def _scaled(x, least, exponents, dtype: tl.constexpr):
    """Quotient of x by a power of two in fp16, and the power's exponent, `least` or more; without exponents x in `dtype`, and 0."""
    exponent = least * 0.0
    if exponents is not None:
        exponent = tl.maximum(exponent_of(tl.max(tl.abs(x))), least)
        x = (x * tl.exp2(-exponent)).to(tl.float16)
    else:
        x = x.to(dtype)
    return x, exponent
