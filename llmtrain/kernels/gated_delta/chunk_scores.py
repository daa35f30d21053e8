"""Outputs of tokens, from the state before their chunk and from what was written in the chunk; and the gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import boundary_decays, load_decays, pair_decays


@triton.jit
def chunk_scores_kernel(
    q, k, log_decay, ids, states, written, y,
    T, chunks, q_row, q_token, k_row, k_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = from_start (q @ state) + (q @ k^T decays) @ written, [rows, T, H, V]."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    t = chunk * C + o
    there = t < T
    out = (row * T + t) * H + head
    of_values = (e < V)[:, None] & there[None, :]
    q += row * q_row + (head // SHARE) * K
    k += row * k_row + (head // SHARE) * K
    states += ((row * chunks + chunk) * H + head) * K * V
    dtype = k.dtype.element_ty
    scores = tl.zeros((C, C), dtype=tl.float32)  # k @ q^T
    found = tl.zeros((BV, C), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys = there[:, None] & (c < K)[None, :]
        queries = tl.load(q + t[:, None] * q_token + c[None, :], mask=of_keys, other=0.0)
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
        state = tl.load(states + c[None, :] * V + e[:, None], mask=(e < V)[:, None] & (c < K)[None, :], other=0.0)
        scores = tl.dot(keys, tl.trans(queries), scores, input_precision=PRECISION)
        found = tl.dot(state, tl.trans(queries), found, input_precision=PRECISION)
    g, total = load_decays(log_decay, row, head, chunk, T, H, C)
    from_start, _, _ = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
    scores *= pair_decays(g, ids, row, chunk, T, C, False, True, DOCUMENTS)
    new = tl.load(written + out[None, :] * V + e[:, None], mask=of_values, other=0.0)
    found = tl.dot(new, scores.to(dtype), found * from_start[None, :], input_precision=PRECISION)
    tl.store(y + out[None, :] * V + e[:, None], found.to(dtype), mask=of_values)


@triton.jit
def written_bwd_kernel(
    q, k, log_decay, ids, dy, d_written,
    T, q_row, q_token, k_row, k_token, dy_row, dy_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The gradient of `written` by the outputs of its own chunk: (q @ k^T decays)^T @ dy, [rows, T, H, V]."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    t = chunk * C + o
    there = t < T
    out = (row * T + t) * H + head
    q += row * q_row + (head // SHARE) * K
    k += row * k_row + (head // SHARE) * K
    dy += row * dy_row + head * V
    dtype = k.dtype.element_ty
    scores = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys = there[:, None] & (c < K)[None, :]
        queries = tl.load(q + t[:, None] * q_token + c[None, :], mask=of_keys, other=0.0)
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
        scores = tl.dot(queries, tl.trans(keys), scores, input_precision=PRECISION)
    g, _ = load_decays(log_decay, row, head, chunk, T, H, C)
    narrow = (scores * pair_decays(g, ids, row, chunk, T, C, False, False, DOCUMENTS)).to(dtype)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        mask = (e < V)[:, None] & there[None, :]
        up = tl.load(dy + t[None, :] * dy_token + e[:, None], mask=mask, other=0.0)
        found = tl.dot(up, narrow, input_precision=PRECISION)
        tl.store(d_written + out[None, :] * V + e[:, None], found.to(dtype), mask=mask)


@triton.jit
def chunk_scores_bwd_kernel(
    q, k, log_decay, ids, states, d_states, written, d_written, dy, dq, dk, dw, dg_parts,
    T, chunks, part, q_row, q_token, k_row, k_token, dy_row, dy_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of dq, dk and dw, [rows, T, H, K], and their part of the gradient of the decays' running sum, [rows, T, H] in
    fp32, `part` apart.

    A pair's score q_i . k_j decay_ij gives its gradient times itself to g_i and takes it from g_j: summed over pairs, that is
    q_i . dq_i and k_j . dk_j. The same holds for the decays from the start and to the end of the chunk.
    """
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, c = tl.arange(0, C), tl.program_id(0) * BK + tl.arange(0, BK)
    t = chunk * C + o
    there = t < T
    out = (row * T + t) * H + head
    q += row * q_row + (head // SHARE) * K
    k += row * k_row + (head // SHARE) * K
    dy += row * dy_row + head * V
    at = ((row * chunks + chunk) * H + head) * K * V
    dtype = k.dtype.element_ty
    d_scores = tl.zeros((C, C), dtype=tl.float32)
    d_queries = tl.zeros((BK, C), dtype=tl.float32)
    d_keys = tl.zeros((BK, C), dtype=tl.float32)
    d_less = tl.zeros((BK, C), dtype=tl.float32)
    d_whole = tl.zeros((BK,), dtype=tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_values, of_state = there[:, None] & (e < V)[None, :], (c < K)[:, None] & (e < V)[None, :]
        up = tl.load(dy + t[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        new = tl.load(written + out[:, None] * V + e[None, :], mask=of_values, other=0.0)
        d_new = tl.load(d_written + out[:, None] * V + e[None, :], mask=of_values, other=0.0)
        state = tl.load(states + at + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        d_state = tl.load(d_states + at + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        d_scores = tl.dot(up, tl.trans(new), d_scores, input_precision=PRECISION)
        d_queries = tl.dot(state, tl.trans(up), d_queries, input_precision=PRECISION)
        d_keys = tl.dot(d_state, tl.trans(new), d_keys, input_precision=PRECISION)
        d_less = tl.dot(state, tl.trans(d_new), d_less, input_precision=PRECISION)
        d_whole += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    g, total = load_decays(log_decay, row, head, chunk, T, H, C)
    from_start, to_end, whole = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
    mask, to = (c < K)[:, None] & there[None, :], out[None, :] * K + c[:, None]
    tl.store(dw + to, (-d_less).to(dtype), mask=mask)
    queries = tl.load(q + t[None, :] * q_token + c[:, None], mask=mask, other=0.0)
    keys = tl.load(k + t[None, :] * k_token + c[:, None], mask=mask, other=0.0)
    d_queries *= from_start[None, :]
    d_keys *= to_end[None, :]
    d_total = tl.sum(d_whole, 0) * whole + tl.sum(tl.sum(keys.to(tl.float32) * d_keys, 1), 0)
    d_scores = (d_scores * pair_decays(g, ids, row, chunk, T, C, False, False, DOCUMENTS)).to(dtype)
    d_queries = tl.dot(keys, tl.trans(d_scores), d_queries, input_precision=PRECISION)
    d_keys = tl.dot(queries, d_scores, d_keys, input_precision=PRECISION)
    d_g = tl.sum(queries.to(tl.float32) * d_queries, 0) - tl.sum(keys.to(tl.float32) * d_keys, 0)
    d_g += tl.where(o == tl.minimum(C, T - chunk * C) - 1, d_total, 0.0)
    tl.store(dq + to, d_queries.to(dtype), mask=mask)
    tl.store(dk + to, d_keys.to(dtype), mask=mask)
    tl.store(dg_parts + tl.program_id(0) * part + out, d_g, mask=there)
