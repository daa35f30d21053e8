"""Outputs of tokens, from the state before their chunk and from what was written in the chunk; and all gradients of a chunk."""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside
from llmtrain.kernels.kimi_delta.chunk_decays import (
    NEAR,
    met,
    of_borders,
    of_diagonal,
    seen_pairs,
    side_by_side,
    to_middle,
)


@triton.jit
def chunk_outputs_kernel(
    q_start, scores, weights, states, errors, y,
    T, chunks, padded,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = q_start @ state + scores @ (beta errors), [rows, T, H, V]."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    there = o < T - chunk * C
    out = (row * T + chunk.to(tl.int64) * C) * H + head
    of_values, to = there[:, None] & inside(e, V, BV)[None, :], out * V + o[:, None] * (H * V) + e[None, :]
    states += ((row * chunks + chunk) * H + head) * K * V
    dtype = y.dtype.element_ty
    b = tl.load(weights + (row * H + head) * padded + chunk * C + o)
    read = tl.load(scores + out * C + o[:, None] * (H * C) + o[None, :], mask=there[:, None], other=0.0)
    error = tl.load(errors + to, mask=of_values, other=0.0)
    found = tl.dot(read, (error * b[:, None]).to(dtype), input_precision=PRECISION)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys, of_state = (
            there[:, None] & inside(c, K, BK)[None, :],
            inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :],
        )
        queries = tl.load(q_start + out * K + o[:, None] * (H * K) + c[None, :], mask=of_keys, other=0.0)
        state = tl.load(states + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        found = tl.dot(queries, state, found, input_precision=PRECISION)
    tl.store(y + to, found.to(dtype), mask=of_values)


@triton.jit
def _far(
    d_q, d_row, d_column, d_R, d_A, q, k, G, dtype: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds what pairs that meet in blocks of S give to queries, and to keys as the later and as the earlier of two, [C, BK]."""
    o = tl.arange(0, C)
    decay = to_middle(G, C, S, BK)
    keys, queries = (k * decay).to(dtype), (q * decay).to(dtype)
    pairs = met(o[:, None], o[None, :], S)
    R, A = tl.where(pairs, d_R, 0.0).to(dtype), tl.where(pairs, d_A, 0.0).to(dtype)
    d_q += decay * tl.dot(R, keys, input_precision=PRECISION)
    d_row += decay * tl.dot(A, keys, input_precision=PRECISION)
    early = tl.dot(tl.trans(R), queries, input_precision=PRECISION)
    d_column += decay * tl.dot(tl.trans(A), keys, early, input_precision=PRECISION)
    return d_q, d_row, d_column


@triton.jit
def _near(
    d_q, d_row, d_column, d_R, d_A, q, k, G, dtype: tl.constexpr,
    C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The same for S of at most 16, all as [C / 16, 16, ...] but q, k and G."""
    r = tl.arange(0, NEAR)
    decay = to_middle(G, C, S, BK)
    keys, queries = side_by_side((k * decay).to(dtype), C, BK), side_by_side((q * decay).to(dtype), C, BK)
    decay = side_by_side(decay, C, BK)
    pairs = met(r[:, None], r[None, :], S)[None, :, :]
    R, A = tl.where(pairs, d_R, 0.0).to(dtype), tl.where(pairs, d_A, 0.0).to(dtype)
    d_q += decay * tl.dot(R, keys, input_precision=PRECISION)
    d_row += decay * tl.dot(A, keys, input_precision=PRECISION)
    early = tl.dot(tl.permute(R, (0, 2, 1)), queries, input_precision=PRECISION)
    d_column += decay * tl.dot(tl.permute(A, (0, 2, 1)), keys, early, input_precision=PRECISION)
    return d_q, d_row, d_column


@triton.jit
def chunk_gradients_kernel(
    q, k, sums, weights, ids, states, d_states, errors, d_written, dy, dq, dk, dv, d_log_decay, d_beta,
    T, chunks, padded, q_row, k_row, dy_row,
    q_token: tl.constexpr, k_token: tl.constexpr, dy_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of dq, dk and, in fp32, d_log_decay, [rows, T, H, K]; dv like v, and d_beta.

    The system's gradient is that of A, -d_written @ errors^T: its transpose has been applied in state_passing_bwd_kernel. A
    pair's product q_i k_j exp(G_i - G_j) gives its gradient times itself to the running sum G_i and takes it from G_j: summed over
    pairs, that is q_i dq_i and k_j dk_j, channel by channel. The same holds for A, and for decays from the start and to the end.
    """
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, c = tl.arange(0, C), tl.program_id(0) * BK + tl.arange(0, BK)
    there = o < T - chunk * C
    begin = chunk.to(tl.int64) * C
    out = (row * T + begin) * H + head
    q += row * q_row + begin * q_token + (head // SHARE) * K
    k += row * k_row + begin * k_token + (head // SHARE) * K
    dy += row * dy_row + begin * dy_token + head * V
    sums += ((row * padded + begin) * H + head) * K
    states += ((row * chunks + chunk) * H + head) * K * V
    d_states += ((row * chunks + chunk) * H + head) * K * V
    dtype = k.dtype.element_ty
    b = tl.load(weights + (row * H + head) * padded + begin + o)

    d_R, d_A = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, C), dtype=tl.float32)
    d_b, d_whole = tl.zeros((C,), dtype=tl.float32), tl.zeros((BK,), dtype=tl.float32)
    d_q, d_row = tl.zeros((C, BK), dtype=tl.float32), tl.zeros((C, BK), dtype=tl.float32)
    d_end = tl.zeros((C, BK), dtype=tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_values, to_values = there[:, None] & inside(e, V, BV)[None, :], out * V + o[:, None] * (H * V) + e[None, :]
        of_state, to_state = inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :], c[:, None] * V + e[None, :]
        up = tl.load(dy + o[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        error = tl.load(errors + to_values, mask=of_values, other=0.0)
        d_new = tl.load(d_written + to_values, mask=of_values, other=0.0)
        state = tl.load(states + to_state, mask=of_state, other=0.0)
        d_state = tl.load(d_states + to_state, mask=of_state, other=0.0)
        d_R = tl.dot(up, tl.trans(error), d_R, input_precision=PRECISION)
        d_A = tl.dot(d_new, tl.trans(error), d_A, input_precision=PRECISION)
        d_q = tl.dot(up, tl.trans(state), d_q, input_precision=PRECISION)
        d_row = tl.dot(d_new, tl.trans(state), d_row, input_precision=PRECISION)
        d_end = tl.dot(error, tl.trans(d_state), d_end, input_precision=PRECISION)
        d_whole += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
        if tl.program_id(0) == 0:
            d_b += tl.sum(error.to(tl.float32) * d_new.to(tl.float32), 1)
            tl.store(dv + to_values, (d_new.to(tl.float32) * b[:, None]).to(dtype), mask=of_values)
    if tl.program_id(0) == 0:
        tl.store(d_beta + out + o * H, d_b, mask=there)
    seen = tl.where(seen_pairs(ids, row, chunk, T, C, DOCUMENTS), b[None, :], 0.0)
    d_R, d_A = d_R * seen, d_A * seen * -b[:, None]

    of_keys, to_keys = there[:, None] & inside(c, K, BK)[None, :], o[:, None] * (H * K) + c[None, :]
    G = tl.load(sums + to_keys, mask=inside(c, K, BK)[None, :], other=0.0)
    total = tl.load(sums + (C - 1) * (H * K) + c, mask=inside(c, K, BK), other=0.0)
    queries = tl.load(q + o[:, None] * q_token + c[None, :], mask=of_keys, other=0.0).to(tl.float32)
    keys = tl.load(k + o[:, None] * k_token + c[None, :], mask=of_keys, other=0.0).to(tl.float32)
    from_start, to_end, whole = of_borders(G, total, ids, row, chunk, T, C, DOCUMENTS)
    d_q *= from_start
    d_row *= -b[:, None] * from_start
    d_column = d_end * b[:, None] * to_end
    d_total = tl.sum(keys * d_column, 0) + whole * d_whole
    if C > 32:
        d_q, d_row, d_column = _far(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 64, BK, PRECISION)
    if C > 16:
        d_q, d_row, d_column = _far(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 32, BK, PRECISION)
    itself = tl.sum(tl.where(o[:, None] == o[None, :], d_R, 0.0), 1)[:, None]
    d_q += itself * keys
    d_column += itself * queries
    d_R, d_A = of_diagonal(d_R, C), of_diagonal(d_A, C)
    d_q, d_row, d_column = side_by_side(d_q, C, BK), side_by_side(d_row, C, BK), side_by_side(d_column, C, BK)
    d_q, d_row, d_column = _near(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 16, BK, PRECISION)
    d_q, d_row, d_column = _near(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 8, BK, PRECISION)
    d_q, d_row, d_column = _near(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 4, BK, PRECISION)
    d_q, d_row, d_column = _near(d_q, d_row, d_column, d_R, d_A, queries, keys, G, dtype, C, 2, BK, PRECISION)
    d_q, d_row, d_column = tl.reshape(d_q, (C, BK)), tl.reshape(d_row, (C, BK)), tl.reshape(d_column, (C, BK))
    tl.store(dq + out * K + to_keys, d_q.to(dtype), mask=of_keys)
    tl.store(dk + out * K + to_keys, (d_row + d_column).to(dtype), mask=of_keys)
    d_G = queries * d_q + keys * (d_row - d_column)
    d_G += tl.where((o == C - 1)[:, None], d_total[None, :], 0.0)
    tl.store(d_log_decay + out * K + to_keys, tl.cumsum(d_G, 0, reverse=True), mask=of_keys)
