"""The backward kernels of attention: one for dq, one for dk and dv, each with one writer per element: deterministic.

With P = exp(score - lse), dP = dO V^T, D = rowsum(dO * O) and dS = P * (dP - D) (FlashAttention-2, arXiv:2307.08691):
dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q. ALiBi adds a constant, hence nothing; a softcap puts its derivative
into dS. The first kernel also makes D, from the dO that it reads anyway, for the second. Together 7 products of the
size of q k^T.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportAssignmentType=false, reportIndexIssue=false, reportOperatorIssue=false, reportOptionalOperand=false

from __future__ import annotations

import triton
import triton.language as tl

from llmtrain.kernels.attention.triton_tiles import (
    LOG2_E,
    capped,
    inner,
    load_rows,
    outer,
    place,
    seen,
    sight,
    spans,
    store_rows,
    zeros,
)


@triton.jit
def attention_dq(
    q, k, v, out, dout, lse, dlse, delta, dq, slopes, starts, ends,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    seq_len, pairs, together, scale, softcap, out_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and delta = rowsum(dout * out) - dlse. Program: tile of queries x (sequence, head), as in the forward kernel.

    dout, dq like q, out and dq contiguous; lse, dlse (or None), delta: [batch, n_heads, T] in fp32. DESCRIBED: k and v
    are tensor descriptors. out_scale: the scale of the score; scale and softcap: times log2(e).
    """
    BACK: tl.constexpr = None if WINDOW is None else WINDOW - 1
    AHEAD: tl.constexpr = 0 if CAUSAL else BACK
    LOWER: tl.constexpr = BACK is not None or starts is not None
    UPPER: tl.constexpr = AHEAD is not None or starts is not None or RAGGED
    tiles = tl.cdiv(seq_len, BLOCK_M)
    tile, pair = place(tiles, pairs, together)
    if CAUSAL:
        tile = tiles - 1 - tile
    batch, head = pair // N_HEADS, pair % N_HEADS
    kv_head = head // GROUP
    begin = tile * BLOCK_M
    i = begin + tl.arange(0, BLOCK_M)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    if not DESCRIBED:
        k += batch.to(tl.int64) * k_batch + kv_head * k_head
        v += batch.to(tl.int64) * v_batch + kv_head * v_head
    q += batch.to(tl.int64) * q_batch + head * q_head
    dout += batch.to(tl.int64) * do_batch + head * do_head
    here = (batch.to(tl.int64) * seq_len * N_HEADS + head) * HEAD_DIM
    out += here
    dq += here
    stats = pair.to(tl.int64) * seq_len + i
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E

    douts = load_rows(dout, 0, 0, begin, seq_len, do_token, BLOCK_M, HEAD_DIM, PARTS, True, False)
    sums = _delta(out, douts, dlse, delta, pair, begin, seq_len, N_HEADS, BLOCK_M, HEAD_DIM, PARTS)

    queries = load_rows(q, 0, 0, begin, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, True, False)
    minus = tl.load(lse + stats, mask=i < seq_len, other=0.0) * LOG2_E
    if slopes is not None and CAUSAL:
        minus += slope * (i - begin)
    first, last = sight(i, starts, ends, seq_len, BACK, AHEAD)
    a, b, c, end = spans(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, BACK, AHEAD)
    acc = zeros(BLOCK_M, PARTS)
    if LOWER:
        for start in tl.range(a, b, BLOCK_N, num_stages=STAGES):
            acc = _add_dq(
                acc, queries, douts, minus, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
                i, begin, first, last, scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, DESCRIBED, PRECISION,
            )  # fmt: skip
    for start in tl.range(b, c, BLOCK_N, num_stages=STAGES):
        acc = _add_dq(
            acc, queries, douts, minus, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
            i, begin, first, last, scale, softcap, slopes, slope, False, CAUSAL, LOWER, UPPER, RAGGED,
            BLOCK_N, HEAD_DIM, PARTS, DESCRIBED, PRECISION,
        )  # fmt: skip
    if UPPER:
        for start in tl.range(c, end, BLOCK_N, num_stages=STAGES):
            acc = _add_dq(
                acc, queries, douts, minus, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
                i, begin, first, last, scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, DESCRIBED, PRECISION,
            )  # fmt: skip
    store_rows(dq, acc, out_scale, begin, seq_len, N_HEADS * HEAD_DIM, BLOCK_M, HEAD_DIM, PARTS)


@triton.jit
def _add_dq(
    acc, queries, douts, minus, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
    i, begin, first, last, scale, softcap, slopes, slope, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values into acc = dS K."""
    CUT: tl.constexpr = MASKED and RAGGED  # the tile may reach beyond the sequence
    start = tl.multiple_of(start, BLOCK_N)
    j = start + tl.arange(0, BLOCK_N)
    keys = load_rows(k, batch, kv_head, start, seq_len, k_token, BLOCK_N, HEAD_DIM, PARTS, CUT, DESCRIBED)
    score = inner(queries, keys, PARTS, PRECISION)
    values = load_rows(v, batch, kv_head, start, seq_len, v_token, BLOCK_N, HEAD_DIM, PARTS, CUT, DESCRIBED)
    dweight = inner(douts, values, PARTS, PRECISION)
    visible = seen(j[None, :], first[:, None], last[:, None], LOWER, UPPER)
    weight, slack = _weights(
        score, minus[:, None], (j - begin)[None, :], i[:, None] - j[None, :], visible,
        scale, softcap, slopes, slope, MASKED, CAUSAL,
    )  # fmt: skip
    dscore = weight * (dweight - sums[:, None])
    if softcap is not None:
        dscore *= slack
    return outer(dscore, keys, acc, PARTS, PRECISION)


@triton.jit
def attention_dkdv(
    q, k, v, dout, lse, delta, dk, dv, slopes, starts, ends,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    seq_len, pairs, together, scale, softcap, out_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, DV_FIRST: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    """dk and dv, summed over the query heads that share them. Program: tile of BLOCK_N keys x (sequence, kv head).

    Arguments as of attention_dq, which has written delta; dk, dv: contiguous. DESCRIBED: q and dout are tensor
    descriptors. Scores are kept with keys as rows: weights and their gradients are then left operands, from registers.
    The early keys, which the most queries see, begin.

    DV_FIRST: dO V^T waits for P^T dO, where registers for both are short. MERGED: every tile is
    masked, in one loop, which takes fewer registers than one loop with masks and one without.
    """
    N_KV: tl.constexpr = N_HEADS // GROUP
    # Which queries a key sees: the other direction in time.
    AHEAD: tl.constexpr = None if WINDOW is None else WINDOW - 1
    BACK: tl.constexpr = 0 if CAUSAL else AHEAD
    LOWER: tl.constexpr = BACK is not None or starts is not None
    UPPER: tl.constexpr = AHEAD is not None or starts is not None or RAGGED
    tile, pair = place(tl.cdiv(seq_len, BLOCK_N), pairs, together)
    batch, kv_head = pair // N_KV, pair % N_KV
    begin = tile * BLOCK_N
    j = begin + tl.arange(0, BLOCK_N)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    k += batch.to(tl.int64) * k_batch + kv_head * k_head
    v += batch.to(tl.int64) * v_batch + kv_head * v_head
    here = (batch.to(tl.int64) * seq_len * N_KV + kv_head) * HEAD_DIM

    keys = load_rows(k, 0, 0, begin, seq_len, k_token, BLOCK_N, HEAD_DIM, PARTS, True, False)
    values = load_rows(v, 0, 0, begin, seq_len, v_token, BLOCK_N, HEAD_DIM, PARTS, True, False)
    first, last = sight(j, starts, ends, seq_len, BACK, AHEAD)
    a, b, c, end = spans(begin, starts, ends, seq_len, BLOCK_N, BLOCK_M, BACK, AHEAD)
    dkeys, dvalues = zeros(BLOCK_N, PARTS), zeros(BLOCK_N, PARTS)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E
        stats = (batch * N_HEADS + head).to(tl.int64) * seq_len
        q_in, dout_in = q, dout
        if not DESCRIBED:
            q_in = q + batch.to(tl.int64) * q_batch + head * q_head
            dout_in = dout + batch.to(tl.int64) * do_batch + head * do_head
        if LOWER and not MERGED:
            for start in tl.range(a, b, BLOCK_M, num_stages=STAGES):
                dkeys, dvalues = _add_dkdv(
                    dkeys, dvalues, keys, values, q_in, dout_in, lse + stats, delta + stats, q_token, do_token,
                    batch, head, start, seq_len, j, begin, first, last, scale, softcap, slopes, slope,
                    True, CAUSAL, LOWER, UPPER, RAGGED, BLOCK_M, HEAD_DIM, PARTS, DESCRIBED, PRECISION, DV_FIRST,
                )  # fmt: skip
        # All that is left of this head, or what needs no mask.
        for start in tl.range(a if MERGED else b, end if MERGED else c, BLOCK_M, num_stages=STAGES):
            dkeys, dvalues = _add_dkdv(
                dkeys, dvalues, keys, values, q_in, dout_in, lse + stats, delta + stats, q_token, do_token,
                batch, head, start, seq_len, j, begin, first, last, scale, softcap, slopes, slope,
                MERGED, CAUSAL, LOWER, UPPER, RAGGED, BLOCK_M, HEAD_DIM, PARTS, DESCRIBED, PRECISION, DV_FIRST,
            )  # fmt: skip
        if UPPER and not MERGED:
            for start in tl.range(c, end, BLOCK_M, num_stages=STAGES):
                dkeys, dvalues = _add_dkdv(
                    dkeys, dvalues, keys, values, q_in, dout_in, lse + stats, delta + stats, q_token, do_token,
                    batch, head, start, seq_len, j, begin, first, last, scale, softcap, slopes, slope,
                    True, CAUSAL, LOWER, UPPER, RAGGED, BLOCK_M, HEAD_DIM, PARTS, DESCRIBED, PRECISION, DV_FIRST,
                )  # fmt: skip
    store_rows(dk + here, dkeys, out_scale, begin, seq_len, N_KV * HEAD_DIM, BLOCK_N, HEAD_DIM, PARTS)
    store_rows(dv + here, dvalues, 1.0, begin, seq_len, N_KV * HEAD_DIM, BLOCK_N, HEAD_DIM, PARTS)


@triton.jit
def _add_dkdv(
    dkeys, dvalues, keys, values, q, dout, lse, delta, q_token, do_token, batch, head, start, seq_len,
    j, begin, first, last, scale, softcap, slopes, slope, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr,
    DV_FIRST: tl.constexpr,
):  # fmt: skip
    """One tile of queries into dkeys = dS^T Q and dvalues = P^T dO."""
    CUT: tl.constexpr = MASKED and RAGGED  # the tile may reach beyond the sequence
    start = tl.multiple_of(start, BLOCK_M)
    i = start + tl.arange(0, BLOCK_M)
    queries = load_rows(q, batch, head, start, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, CUT, DESCRIBED)
    score = inner(keys, queries, PARTS, PRECISION)
    if not DV_FIRST:
        douts = load_rows(dout, batch, head, start, seq_len, do_token, BLOCK_M, HEAD_DIM, PARTS, CUT, DESCRIBED)
        dweight = inner(values, douts, PARTS, PRECISION)
    minus = tl.load(lse + i, mask=i < seq_len if CUT else None, other=0.0 if CUT else None) * LOG2_E
    if slopes is not None and CAUSAL:
        minus += slope * (i - begin)
    visible = seen(i[None, :], first[:, None], last[:, None], LOWER, UPPER)
    weight, slack = _weights(
        score, minus[None, :], (j - begin)[:, None], i[None, :] - j[:, None], visible,
        scale, softcap, slopes, slope, MASKED, CAUSAL,
    )  # fmt: skip
    if DV_FIRST:
        douts = load_rows(dout, batch, head, start, seq_len, do_token, BLOCK_M, HEAD_DIM, PARTS, CUT, DESCRIBED)
    dvalues = outer(weight, douts, dvalues, PARTS, PRECISION)
    if DV_FIRST:
        dweight = inner(values, douts, PARTS, PRECISION)
    # Read as late as this: it takes as many registers as a score has columns.
    sums = tl.load(delta + i, mask=i < seq_len if CUT else None, other=0.0 if CUT else None)
    dscore = weight * (dweight - sums[None, :])
    if softcap is not None:
        dscore *= slack
    dkeys = outer(dscore, queries, dkeys, PARTS, PRECISION)
    return dkeys, dvalues


@triton.jit
def _weights(
    score, minus, column, distance, visible, scale, softcap, slopes, slope, MASKED: tl.constexpr, CAUSAL: tl.constexpr
):
    """exp(score - lse) from q k^T, and the softcap's derivative; either way round.

    minus: log2(e) lse, plus the part of ALiBi that a query has for all keys; column: key's position, the other part.
    """
    slack = score
    if softcap is not None:
        score, slack = capped(score, scale, softcap)
    else:
        score = score * scale
    if slopes is not None and CAUSAL:
        score = score + slope * column
    elif slopes is not None:
        score = score - slope * tl.abs(distance)
    weight = tl.exp2(score - minus)
    if MASKED:
        # After the exponential: that of a query that sees nothing (lse = -inf) is infinite here.
        weight = tl.where(visible, weight, 0.0)
    return weight, slack


@triton.jit
def _delta(
    out, douts, dlse, delta, pair, begin, seq_len,
    N_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) - dlse of one tile of queries, stored and returned. out: of this sequence and head."""
    i = begin + tl.arange(0, ROWS)
    stats = pair.to(tl.int64) * seq_len + i
    outs = load_rows(out, 0, 0, begin, seq_len, N_HEADS * HEAD_DIM, ROWS, HEAD_DIM, PARTS, True, False)
    sums = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(len(PARTS)):
        sums += tl.sum(douts[part].to(tl.float32) * outs[part].to(tl.float32), 1)
    if dlse is not None:
        sums -= tl.load(dlse + stats, mask=i < seq_len, other=0.0)
    tl.store(delta + stats, sums, mask=i < seq_len)
    return sums
