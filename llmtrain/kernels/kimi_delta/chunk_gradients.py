"""All gradients of a chunk: of the products of its tokens' pairs, and from these and the states of queries, keys and decays.

The system's gradient is that of A, -d_written @ errors^T: its transpose has been applied in state_passing_bwd_kernel. A pair's
product q_i k_j exp(G_i - G_j) gives its gradient times itself to the running sum G_i and takes it from G_j: summed over pairs,
that is q_i dq_i and k_j dk_j, channel by channel. The same holds for A, and for decays from the start and to the end of the chunk.
Both tokens of a pair take the same factors, so that in the sums over later tokens what they give and take cancels: for pairs of two
blocks rounded ones. Near pairs decay least and weigh most, so theirs are of two parts, of twice the digits.
"""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside, load_documents
from llmtrain.kernels.kimi_delta.chunk_decays import (
    LEVELS,
    NEAR,
    load_border,
    load_rows,
    load_sums,
    met,
    of_borders,
    to_middle,
)
from llmtrain.kernels.launch import jit


@jit
def pair_gradients_kernel(
    weights, ids, errors, d_written, dy, d_scores, d_system, dv,
    T, padded, dy_row,
    dy_token: tl.constexpr,
    H: tl.constexpr, V: tl.constexpr, C: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> the gradients of the scores times beta and of A, [rows, T, H, C]; and dv like v."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    there = o < T - chunk * C
    begin = chunk.to(tl.int64) * C
    out = (row * T + begin) * H + head
    dy += row * dy_row + begin * dy_token + head * V
    b = tl.load(weights + (row * H + head) * padded + begin + o)
    d_R, d_A = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_values, to_values = there[:, None] & inside(e, V, BV)[None, :], out * V + o[:, None] * (H * V) + e[None, :]
        up = tl.load(dy + o[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        error = tl.load(errors + to_values, mask=of_values, other=0.0)
        d_new = tl.load(d_written + to_values, mask=of_values, other=0.0)
        d_R = tl.dot(up, tl.trans(error), d_R, input_precision=PRECISION)
        d_A = tl.dot(d_new, tl.trans(error), d_A, input_precision=PRECISION)
        tl.store(dv + to_values, (d_new.to(tl.float32) * b[:, None]).to(dv.dtype.element_ty), mask=of_values)
    seen = o[:, None] >= o[None, :]
    if DOCUMENTS:
        own, _, _ = load_documents(ids, row, chunk, T, C)
        seen = seen & (own[:, None] == own[None, :])
    seen = tl.where(seen, b[None, :], 0.0)
    square = out * C + o[:, None] * (H * C) + o[None, :]
    dtype = d_scores.dtype.element_ty
    tl.store(d_scores + square, (d_R * seen).to(dtype), mask=there[:, None])
    tl.store(d_system + square, (d_A * seen * -b[:, None]).to(dtype), mask=there[:, None])


@triton.jit
def _add_product(found, narrow, wide, PRECISION: tl.constexpr):
    """found + narrow @ wide, in fp32; wide: fp32, as the sum of two numbers of narrow's dtype."""
    high = wide.to(narrow.dtype)
    found = tl.dot(narrow, high, found, input_precision=PRECISION)
    if narrow.dtype != tl.float32:
        found = tl.dot(narrow, (wide - high.to(tl.float32)).to(narrow.dtype), found, input_precision=PRECISION)
    return found


@jit
def chunk_gradients_kernel(
    q, k, sums, weights, ids, states, d_states, errors, d_written, dy, d_scores, d_system, dq, dk, d_log_decay,
    T, chunks, padded, q_row, k_row, dy_row,
    q_token: tl.constexpr, k_token: tl.constexpr, dy_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BK channels of dq, dk and, in fp32, d_log_decay, [rows, T, H, K]. Blocks of 16 tokens in turn, the last first: with them
    goes the sum of what later tokens give to the running sums."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, r, c = tl.arange(0, C), tl.arange(0, NEAR), tl.program_id(0) * BK + tl.arange(0, BK)
    below = T - chunk * C
    begin = chunk.to(tl.int64) * C
    out = (row * T + begin) * H + head
    q += row * q_row + begin * q_token + (head // SHARE) * K
    k += row * k_row + begin * k_token + (head // SHARE) * K
    dy += row * dy_row + begin * dy_token + head * V
    sums += ((row * padded + begin) * H + head) * K
    weights += (row * H + head) * padded + begin
    states += ((row * chunks + chunk) * H + head) * K * V
    d_states += ((row * chunks + chunk) * H + head) * K * V
    errors += out * V
    d_written += out * V
    d_scores += out * C
    d_system += out * C
    dtype = k.dtype.element_ty
    total = tl.load(sums + (C - 1) * (H * K) + c, mask=inside(c, K, BK), other=0.0)
    if DOCUMENTS:
        _, before, last = load_documents(ids, row, chunk, T, C)

    # What the decay of the whole chunk, and those to its end, give to the last running sum.
    later, to_last = tl.zeros((BK,), dtype=tl.float32), tl.zeros((C, BK), dtype=tl.float32)
    for first in range(0, V, BV):
        e = first + tl.arange(0, BV)
        of_state, to_state = inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :], c[:, None] * V + e[None, :]
        mask = (o < below)[:, None] & inside(e, V, BV)[None, :]
        error = tl.load(errors + o[:, None] * (H * V) + e[None, :], mask=mask, other=0.0)
        state = tl.load(states + to_state, mask=of_state, other=0.0)
        d_state = tl.load(d_states + to_state, mask=of_state, other=0.0)
        to_last = tl.dot(error, tl.trans(d_state), to_last, input_precision=PRECISION)
        later += tl.sum(state.to(tl.float32) * d_state.to(tl.float32), 1)
    _, decays_to_end, whole = of_borders(load_sums(sums, o, c, H * K, K, BK), total, ids, row, chunk, T, C, DOCUMENTS)
    to_last *= load_rows(k, o, c, below, k_token, K, BK) * decays_to_end * tl.load(weights + o)[:, None]
    later = later * whole + tl.sum(to_last, 0)

    for n in range(C // NEAR):
        block = C // NEAR - 1 - n
        i = block * NEAR + r
        there = (i < below)[:, None]
        d_q, d_k = tl.zeros((NEAR, BK), dtype=tl.float32), tl.zeros((NEAR, BK), dtype=tl.float32)
        d_end = tl.zeros((NEAR, BK), dtype=tl.float32)
        for first in range(0, V, BV):
            e = first + tl.arange(0, BV)
            of_state, to_state = inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :], c[:, None] * V + e[None, :]
            mask, to_values = there & inside(e, V, BV)[None, :], i[:, None] * (H * V) + e[None, :]
            up = tl.load(dy + i[:, None] * dy_token + e[None, :], mask=mask, other=0.0)
            error = tl.load(errors + to_values, mask=mask, other=0.0)
            d_new = tl.load(d_written + to_values, mask=mask, other=0.0)
            state = tl.trans(tl.load(states + to_state, mask=of_state, other=0.0))
            d_state = tl.trans(tl.load(d_states + to_state, mask=of_state, other=0.0))
            d_q = tl.dot(up, state, d_q, input_precision=PRECISION)
            d_k = tl.dot(d_new, state, d_k, input_precision=PRECISION)
            d_end = tl.dot(error, d_state, d_end, input_precision=PRECISION)
        G, b = load_sums(sums, i, c, H * K, K, BK), tl.load(weights + i)[:, None]
        queries, keys = load_rows(q, i, c, below, q_token, K, BK), load_rows(k, i, c, below, k_token, K, BK)
        from_start, to_end = tl.exp(G), tl.exp(total[None, :] - G)
        if DOCUMENTS:
            own = tl.load(ids + row * T + tl.minimum(begin + i, T - 1))[:, None]
            from_start, to_end = tl.where(own == before, from_start, 0.0), tl.where(own == last, to_end, 0.0)
        d_q *= from_start
        d_k *= -b * from_start
        d_end *= b * to_end
        d_G = queries * d_q + keys * (d_k - d_end)
        d_k += d_end

        for other in range(block):  # of earlier tokens
            j = other * NEAR + r
            border = load_border(sums, other, c, H * K, K, BK)
            decay = tl.exp(G - border)
            early = tl.exp(border - load_sums(sums, j, c, H * K, K, BK))
            early = (load_rows(k, j, c, below, k_token, K, BK) * early).to(dtype)
            pairs = i[:, None] * (H * C) + j[None, :]
            R, A = tl.load(d_scores + pairs, mask=there, other=0.0), tl.load(d_system + pairs, mask=there, other=0.0)
            by_scores = tl.dot(R, early, input_precision=PRECISION)
            by_system = tl.dot(A, early, input_precision=PRECISION)
            d_q += decay * by_scores
            d_k += decay * by_system
            d_G += (queries * decay).to(dtype).to(tl.float32) * by_scores
            d_G += (keys * decay).to(dtype).to(tl.float32) * by_system

        border = load_border(sums, block, c, H * K, K, BK)
        decay = tl.exp(border - G)
        found = tl.zeros((NEAR, BK), dtype=tl.float32)
        for other in range(block + 1, C // NEAR):  # of later tokens
            j = other * NEAR + r
            late = tl.exp(load_sums(sums, j, c, H * K, K, BK) - border)
            late_queries = (load_rows(q, j, c, below, q_token, K, BK) * late).to(dtype)
            late_keys = (load_rows(k, j, c, below, k_token, K, BK) * late).to(dtype)
            pairs, mask = j[None, :] * (H * C) + i[:, None], (j < below)[None, :]
            R, A = tl.load(d_scores + pairs, mask=mask, other=0.0), tl.load(d_system + pairs, mask=mask, other=0.0)
            found = tl.dot(R, late_queries, found, input_precision=PRECISION)
            found = tl.dot(A, late_keys, found, input_precision=PRECISION)
        d_k += decay * found
        d_G -= (keys * decay).to(dtype).to(tl.float32) * found

        # Of tokens of the block: those of the second half of a part get from the first, and the other way around.
        pairs, turned = i[:, None] * (H * C) + i[None, :], i[None, :] * (H * C) + i[:, None]
        R = tl.load(d_scores + pairs, mask=there, other=0.0)
        R_turned = tl.load(d_scores + turned, mask=(i < below)[None, :], other=0.0)
        A = tl.load(d_system + pairs, mask=there, other=0.0)
        A_turned = tl.load(d_system + turned, mask=(i < below)[None, :], other=0.0)
        itself = tl.sum(tl.where(r[:, None] == r[None, :], R.to(tl.float32), 0.0), 1)[:, None]
        d_q += itself * keys
        d_k += itself * queries
        for level in range(LEVELS):
            decay = to_middle(G, sums, block, level, c, H * K, K, BK)
            of_queries, of_keys = queries * decay, keys * decay
            late, early = met(level), tl.trans(met(level))
            by_scores, found = tl.zeros((NEAR, BK), dtype=tl.float32), tl.zeros((NEAR, BK), dtype=tl.float32)
            by_scores = _add_product(by_scores, tl.where(late, R, 0.0).to(dtype), of_keys, PRECISION)
            both = tl.where(late, A, tl.where(early, A_turned, 0.0)).to(dtype)
            found = _add_product(found, tl.where(early, R_turned, 0.0).to(dtype), of_queries, PRECISION)
            found = _add_product(found, both, of_keys, PRECISION)
            d_q += decay * by_scores
            d_k += decay * found
            is_late = (r // (NEAR >> level + 1)) % 2 == 1
            sign = tl.where(is_late, 1.0, -1.0)[:, None]
            d_G += of_queries * by_scores + sign * of_keys * found

        mask, to = there & inside(c, K, BK)[None, :], out * K + i[:, None] * (H * K) + c[None, :]
        tl.store(dq + to, d_q.to(dtype), mask=mask)
        tl.store(dk + to, d_k.to(dtype), mask=mask)
        tl.store(d_log_decay + to, tl.cumsum(d_G, 0, reverse=True) + later[None, :], mask=mask)
        later += tl.sum(d_G, 0)
