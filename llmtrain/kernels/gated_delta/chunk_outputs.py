"""Outputs of tokens, from the state before their chunk and from what was written in the chunk; and all gradients of a chunk."""

import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside, load_decays, pair_decays
from llmtrain.kernels.launch import jit


@jit
def chunk_outputs_kernel(
    q, k, decays, ids, states, errors, y, scores,
    T, chunks, padded, part, q_row, k_row,
    q_token: tl.constexpr, k_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = from_start (q @ state) + scores @ (beta errors), [rows, T, H, V]; scores = (q @ k^T) decays, [rows, T, H, C]."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    there = o < T - chunk * C
    begin = chunk.to(tl.int64) * C
    out = (row * T + begin) * H + head
    of_values = there[:, None] & inside(e, V, BV)[None, :]
    q += row * q_row + begin * q_token + (head // SHARE) * K
    k += row * k_row + begin * k_token + (head // SHARE) * K
    states += ((row * chunks + chunk) * H + head) * K * V
    errors += out * V
    y += out * V
    dtype = k.dtype.element_ty
    products = tl.zeros((C, C), dtype=tl.float32)
    found = tl.zeros((C, BV), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys = there[:, None] & inside(c, K, BK)[None, :]
        queries = tl.load(q + o[:, None] * q_token + c[None, :], mask=of_keys, other=0.0)
        keys = tl.load(k + o[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
        state = tl.load(
            states + c[:, None] * V + e[None, :], mask=inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :], other=0.0
        )
        products = tl.dot(queries, tl.trans(keys), products, input_precision=PRECISION)
        found = tl.dot(queries, state, found, input_precision=PRECISION)
    g, b, from_start, _, _ = load_decays(decays, row * H + head, chunk, padded, part, C)
    products *= pair_decays(g, ids, row, chunk, T, C, DOCUMENTS)
    if tl.program_id(0) == 0:
        tl.store(scores + out * C + o[:, None] * (H * C) + o[None, :], products.to(dtype), mask=there[:, None])
    error = tl.load(errors + o[:, None] * (H * V) + e[None, :], mask=of_values, other=0.0)
    read = (products * b[None, :]).to(dtype)
    found = tl.dot(read, error, found * from_start[:, None], input_precision=PRECISION)
    tl.store(y + o[:, None] * (H * V) + e[None, :], found.to(dtype), mask=of_values)


@jit
def chunk_gradients_kernel(
    q, k, decays, ids, states, d_states, errors, d_written, dy, dq, dk, dv, d_log_decay, d_beta,
    T, chunks, padded, part, tokens, q_row, k_row, dy_row,
    q_token: tl.constexpr, k_token: tl.constexpr, dy_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of dq and dk, [rows, T, H, K], and their part of d_log_decay, [rows, T, H] in fp32, `tokens` apart; dv like v,
    and d_beta.

    The system's gradient is that of A, -d_written @ errors^T: its transpose has been applied in state_passing_bwd_kernel. A
    pair's score q_i . k_j decay_ij gives its gradient times itself to the running sum g_i and takes it from g_j: summed over
    pairs, that is q_i . dq_i and k_j . dk_j. The same holds for A, and for decays from the start and to the end of the chunk.
    """
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, c = tl.arange(0, C), tl.program_id(0) * BK + tl.arange(0, BK)
    there = o < T - chunk * C
    begin = chunk.to(tl.int64) * C
    out = (row * T + begin) * H + head
    q += row * q_row + begin * q_token + (head // SHARE) * K
    k += row * k_row + begin * k_token + (head // SHARE) * K
    dy += row * dy_row + begin * dy_token + head * V
    states += ((row * chunks + chunk) * H + head) * K * V
    d_states += ((row * chunks + chunk) * H + head) * K * V
    errors += out * V
    d_written += out * V
    dv += out * V
    dq += out * K
    dk += out * K
    dtype = k.dtype.element_ty
    g, b, from_start, to_end, whole = load_decays(decays, row * H + head, chunk, padded, part, C)

    d_scores = tl.zeros((C, C), dtype=tl.float32)
    d_A = tl.zeros((C, C), dtype=tl.float32)
    d_b = tl.zeros((C,), dtype=tl.float32)
    d_queries = tl.zeros((C, BK), dtype=tl.float32)
    d_keys = tl.zeros((C, BK), dtype=tl.float32)  # of keys by which tokens correct what others have written before
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_values, of_state = (
            there[:, None] & inside(e, V, BV)[None, :],
            inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :],
        )
        up = tl.load(dy + o[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        error = tl.load(errors + o[:, None] * (H * V) + e[None, :], mask=of_values, other=0.0)
        d_new = tl.load(d_written + o[:, None] * (H * V) + e[None, :], mask=of_values, other=0.0)
        state = tl.load(states + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        d_scores = tl.dot(up, tl.trans(error), d_scores, input_precision=PRECISION)
        d_A = tl.dot(d_new, tl.trans(error), d_A, input_precision=PRECISION)
        d_queries = tl.dot(up, tl.trans(state), d_queries, input_precision=PRECISION)
        d_keys = tl.dot(d_new, tl.trans(state), d_keys, input_precision=PRECISION)
        if tl.program_id(0) == 0:
            d_b += tl.sum(error.to(tl.float32) * d_new.to(tl.float32), 1)
            d_values = (d_new.to(tl.float32) * b[:, None]).to(dtype)
            tl.store(dv + o[:, None] * (H * V) + e[None, :], d_values, mask=of_values)
    if tl.program_id(0) == 0:
        tl.store(d_beta + out + o * H, d_b, mask=there)
    between = pair_decays(g, ids, row, chunk, T, C, DOCUMENTS) * b[None, :]
    d_A *= tl.where(o[:, None] > o[None, :], between * -b[:, None], 0.0)
    d_scores, d_A = (d_scores * between).to(dtype), d_A.to(dtype)
    of_keys, to = there[:, None] & inside(c, K, BK)[None, :], o[:, None] * (H * K) + c[None, :]
    keys = tl.load(k + o[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
    d_queries = tl.dot(d_scores, keys, d_queries * from_start[:, None], input_precision=PRECISION)
    d_keys = tl.dot(d_A, keys, d_keys * (-b * from_start)[:, None], input_precision=PRECISION)
    queries = tl.load(q + o[:, None] * q_token + c[None, :], mask=of_keys, other=0.0)
    tl.store(dq + to, d_queries.to(dtype), mask=of_keys)
    d_g = tl.sum(queries.to(tl.float32) * d_queries + keys.to(tl.float32) * d_keys, 1)
    # Of keys along which others read and correct later what was written.
    d_written_keys = tl.zeros((C, BK), dtype=tl.float32)
    d_whole = tl.zeros((BK,), dtype=tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_values, of_state = (
            there[:, None] & inside(e, V, BV)[None, :],
            inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :],
        )
        error = tl.load(errors + o[:, None] * (H * V) + e[None, :], mask=of_values, other=0.0)
        state = tl.load(states + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        d_state = tl.load(d_states + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        d_written_keys = tl.dot(error, tl.trans(d_state), d_written_keys, input_precision=PRECISION)
        d_whole += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    d_written_keys *= (b * to_end)[:, None]
    d_total = tl.sum(keys.to(tl.float32) * d_written_keys, 1)
    d_written_keys = tl.dot(tl.trans(d_scores), queries, d_written_keys, input_precision=PRECISION)
    d_written_keys = tl.dot(tl.trans(d_A), keys, d_written_keys, input_precision=PRECISION)
    d_g -= tl.sum(keys.to(tl.float32) * d_written_keys, 1)
    tl.store(dk + to, (d_keys + d_written_keys).to(dtype), mask=of_keys)
    last = o == tl.minimum(C, T - chunk * C) - 1
    d_g += tl.where(last, tl.sum(d_total, 0) + whole * tl.sum(d_whole, 0), 0.0)
    tl.store(d_log_decay + tl.program_id(0) * tokens + out + o * H, tl.cumsum(d_g, 0, reverse=True), mask=there)
