"""Kernels of attention's backward pass by stored gradients of scores (see stored_dscores.py): delta; and dv with dS^T.

Where heads are wide, sums of dq, dk and dv leave a program few registers, and each kernel of triton_backward.py computes the scores
anew. Here a program keeps one sum, dv's, and what dq and dk are made of goes to memory.
"""

import triton
import triton.language as tl

from llmtrain.kernels.attention.triton_backward import _delta, _weights
from llmtrain.kernels.attention.triton_tiles import LOG2_E, dot_accumulate, dot_transposed, load_rows, store_rows, zeros
from llmtrain.kernels.launch import jit


@jit
def attention_delta(
    out, dout, dlse, delta, do_batch, do_token, do_head, seq_len,
    N_HEADS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(dout * out) - dlse, [batch, n_heads, T] in fp32. Program: tile of queries x (sequence, head)."""
    pair = tl.program_id(1)
    batch, head = pair // N_HEADS, pair % N_HEADS
    begin = tl.program_id(0) * BLOCK_M
    dout += batch.to(tl.int64) * do_batch + head * do_head
    out += (batch.to(tl.int64) * seq_len * N_HEADS + head) * VALUE_DIM
    dout_tile = load_rows(dout, 0, 0, begin, seq_len, do_token, BLOCK_M, VALUE_DIM, VALUE_PARTS, True, False)
    _delta(out, dout_tile, dlse, delta, pair, begin, seq_len, N_HEADS, BLOCK_M, VALUE_DIM, VALUE_PARTS)


@jit
def attention_dv_dscores(
    q, k, v, dout, lse, delta, dscores, dv, slopes,
    q_token, q_head, k_token, k_head, v_token, v_head, do_token, do_head, dv_token, dv_head, stats_head,
    queries, keys, heads, ahead, scale, softcap, out_scale,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """dv and dS^T of one sequence's `queries` and `keys`, both in whole tiles. Program: tile of BLOCK_N keys x query head.

    q: [queries, heads, head_dim], dout of value_dim; k: [keys, heads / GROUP, head_dim], v of value_dim; dv: like v, of all heads;
    lse, delta: [heads, queries] in fp32, stats_head apart. dscores: out_scale * dS^T, [heads * keys, queries], or with USE_TMA its
    descriptor. ahead: tokens from key 0 to query 0: query i sees key j <= i + ahead, so all where ahead >= keys. What is not seen
    gets zeros.
    ADD: dv is added to. scale, softcap: times log2(e).
    """
    at = tl.program_id(0)
    head, tile = at % heads, at // heads
    kv_head = head // GROUP
    begin = tile * BLOCK_N
    j = begin + tl.arange(0, BLOCK_N)
    row = head * keys + begin
    q += head * q_head
    dout += head * do_head
    lse += head.to(tl.int64) * stats_head
    delta += head.to(tl.int64) * stats_head
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E
    k_tile = load_rows(k + kv_head * k_head, 0, 0, begin, keys, k_token, BLOCK_N, HEAD_DIM, PARTS, False, False)
    v_tile = load_rows(v + kv_head * v_head, 0, 0, begin, keys, v_token, BLOCK_N, VALUE_DIM, VALUE_PARTS, False, False)
    dv += head.to(tl.int64) * dv_head
    acc = zeros(BLOCK_N, VALUE_PARTS)
    if ADD:
        acc = load_rows(dv, 0, 0, begin, keys, dv_token, BLOCK_N, VALUE_DIM, VALUE_PARTS, False, False)
    first = tl.minimum(tl.maximum(begin - ahead, 0) // BLOCK_M * BLOCK_M, queries)
    seen_by_all = tl.minimum(tl.maximum(tl.cdiv(begin + BLOCK_N - 1 - ahead, BLOCK_M) * BLOCK_M, first), queries)
    nothing = tl.zeros((BLOCK_N, BLOCK_M), k_tile[0].dtype)
    for start in range(0, first, BLOCK_M):
        _store(dscores, nothing, row, start, queries, BLOCK_N, BLOCK_M, USE_TMA)
    for start in tl.range(first, seen_by_all, BLOCK_M, num_stages=NUM_STAGES):
        acc = _add_queries(
            acc, k_tile, v_tile, q, dout, lse, delta, dscores, q_token, do_token, row, start, queries, j, begin, ahead,
            scale, softcap, out_scale, slopes, slope, True, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, BLOCK_M, BLOCK_N,
            USE_TMA, PRECISION,
        )  # fmt: skip
    for start in tl.range(seen_by_all, queries, BLOCK_M, num_stages=NUM_STAGES):
        acc = _add_queries(
            acc, k_tile, v_tile, q, dout, lse, delta, dscores, q_token, do_token, row, start, queries, j, begin, ahead,
            scale, softcap, out_scale, slopes, slope, False, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, BLOCK_M, BLOCK_N,
            USE_TMA, PRECISION,
        )  # fmt: skip
    store_rows(dv, acc, 1.0, begin, keys, dv_token, BLOCK_N, VALUE_DIM, VALUE_PARTS)


@triton.jit
def _add_queries(
    acc, k_tile, v_tile, q, dout, lse, delta, dscores, q_token, do_token, row, start, queries, j, begin, ahead,
    scale, softcap, out_scale, slopes, slope, MASKED: tl.constexpr,
    HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one tile of queries to acc = P^T dO, and store its dS^T."""
    start = tl.multiple_of(start, BLOCK_M)
    i = start + tl.arange(0, BLOCK_M)
    place = i + ahead  # among the keys
    q_tile = load_rows(q, 0, 0, start, queries, q_token, BLOCK_M, HEAD_DIM, PARTS, False, False)
    score = dot_transposed(k_tile, q_tile, PARTS, PRECISION)
    dout_tile = load_rows(dout, 0, 0, start, queries, do_token, BLOCK_M, VALUE_DIM, VALUE_PARTS, False, False)
    dweight = dot_transposed(v_tile, dout_tile, VALUE_PARTS, PRECISION)
    lse_log2 = tl.load(lse + i) * LOG2_E
    if slopes is not None:
        lse_log2 += slope * (place - begin)
    weight, d_softcap = _weights(
        score, lse_log2[None, :], (j - begin)[:, None], place[None, :] - j[:, None], j[:, None] <= place[None, :],
        scale, softcap, slopes, slope, MASKED, True,
    )  # fmt: skip
    acc = dot_accumulate(weight, dout_tile, acc, VALUE_PARTS, PRECISION)
    # Scaled before it is rounded: products of stored numbers are final.
    dscore = weight * (dweight * out_scale - (tl.load(delta + i) * out_scale)[None, :])
    if softcap is not None:
        dscore *= d_softcap
    _store(dscores, dscore.to(q_tile[0].dtype), row, start, queries, BLOCK_N, BLOCK_M, USE_TMA)
    return acc


@triton.jit
def _store(target, tile, row, column, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USE_TMA: tl.constexpr):
    """Store a tile of target[rows, columns], a pointer or with USE_TMA a tensor descriptor, from (row, column) on."""
    if USE_TMA:
        target.store([row, column], tile)
    else:
        rows = (row + tl.arange(0, ROWS)).to(tl.int64)
        tl.store(target + (rows[:, None] * columns + (column + tl.arange(0, COLUMNS))[None, :]), tile)
