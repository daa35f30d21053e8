"""The forward kernel of attention: FlashAttention-2 (Dao, arXiv:2307.08691) with tiles as in triton_tiles.py.

One program per tile of queries and head. It loops over the tiles of keys that its queries see and keeps, per query,
the largest score so far, the sum of exponentials relative to it and the sum of values; the scores stay on chip. Reads
q once, k and v once per tile of queries (from L2, mostly); writes the output and the log-sum-exp.
"""

import triton
import triton.language as tl

from llmtrain.kernels.attention.triton_tiles import (
    LOG2_E,
    LOWEST,
    dot_accumulate,
    dot_transposed,
    in_range,
    in_registers,
    load_rows,
    program_tile,
    softcap_score,
    store_rows,
    tile_ranges,
    visible_range,
    zeros,
)
from llmtrain.kernels.launch import jit


@jit
def attention_forward(
    q, k, v, out, lse, slopes, sinks, starts, ends,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head,
    seq_len, pairs, pairs_in_flight, scale, softcap,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, ONE_LOOP: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """Attention forward: out = softmax(score) v; lse = log of the sum of exponentials. Program: tile of queries x (sequence, head).

    q: [batch, T, n_heads, head_dim], k: [batch, T, n_kv_heads, head_dim] and v: [batch, T, n_kv_heads, VALUE_DIM] by strides;
    out: [batch, T, n_heads, VALUE_DIM], contiguous; lse: [batch, n_heads, T] in fp32; sinks: [n_heads] in fp32, a further
    logit of each head, or None. USE_TMA: k and v are tensor descriptors of [batch, n_kv_heads, T, head_dim].
    scale and softcap: times log2(e). RAGGED: T is no multiple of BLOCK_N. ONE_LOOP: all tiles in one loop, in which a branch masks
    those that need it, instead of a loop for those and one for the others: Triton fills the pipeline once. IN_REGISTERS: 1: q is
    read from registers in every product.
    """
    LOOK_BACK: tl.constexpr = None if WINDOW is None else WINDOW - 1
    LOOK_AHEAD: tl.constexpr = 0 if CAUSAL else LOOK_BACK
    LOWER: tl.constexpr = LOOK_BACK is not None or starts is not None
    UPPER: tl.constexpr = LOOK_AHEAD is not None or starts is not None or RAGGED
    tiles = tl.cdiv(seq_len, BLOCK_M)
    tile, pair = program_tile(tiles, pairs, pairs_in_flight)
    if CAUSAL:  # late queries see the most keys: they start first, so that none of them runs alone at the end
        tile = tiles - 1 - tile
    batch, head = pair // N_HEADS, pair % N_HEADS
    kv_head = head // GROUP
    begin = tile * BLOCK_M
    i = begin + tl.arange(0, BLOCK_M)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    if not USE_TMA:
        k += batch.to(tl.int64) * k_batch + kv_head * k_head
        v += batch.to(tl.int64) * v_batch + kv_head * v_head
    q += batch.to(tl.int64) * q_batch + head * q_head
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E

    q_tile = load_rows(q, 0, 0, begin, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, True, False)
    if IN_REGISTERS > 0:
        q_tile = in_registers(q_tile, BLOCK_M, PARTS)
    first, last = visible_range(i, starts, ends, seq_len, LOOK_BACK, LOOK_AHEAD)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, LOOK_BACK, LOOK_AHEAD)

    acc = zeros(BLOCK_M, VALUE_PARTS)
    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    if LOWER and not ONE_LOOP:
        for start in tl.range(a, b, BLOCK_N, num_stages=NUM_STAGES):
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q_tile, k, v, k_token, v_token, batch, kv_head, start, seq_len, i, begin, first, last,
                scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION,
            )  # fmt: skip
    # Tiles that need no mask; with ONE_LOOP all of them.
    for start in tl.range(a if ONE_LOOP else b, end if ONE_LOOP else c, BLOCK_N, num_stages=NUM_STAGES):
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q_tile, k, v, k_token, v_token, batch, kv_head, start, seq_len, i, begin, first, last,
            scale, softcap, slopes, slope, ONE_LOOP, CAUSAL, LOWER, UPPER, RAGGED,
            BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION, (start < b) | (start >= c) if ONE_LOOP else None,
        )  # fmt: skip
    if UPPER and not ONE_LOOP:
        for start in tl.range(c, end, BLOCK_N, num_stages=NUM_STAGES):
            acc, row_max, row_sum = attend_tile(
                acc, row_max, row_sum, q_tile, k, v, k_token, v_token, batch, kv_head, start, seq_len, i, begin, first, last,
                scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION,
            )  # fmt: skip

    # A query that sees no key gets zeros, and -inf.
    out += (batch.to(tl.int64) * seq_len * N_HEADS + head) * VALUE_DIM
    if sinks is None:
        inverse = 1.0 / tl.where(row_sum > 0, row_sum, 1.0)
        store_rows(out, acc, inverse[:, None], begin, seq_len, N_HEADS * VALUE_DIM, BLOCK_M, VALUE_DIM, VALUE_PARTS)
    if slopes is not None and CAUSAL:
        row_max -= slope * (i - begin)
    if sinks is not None:
        sink = tl.load(sinks + head) * LOG2_E
        highest = tl.maximum(row_max, sink)
        rescale = tl.exp2(row_max - highest)
        row_sum = row_sum * rescale + tl.exp2(sink - highest)
        row_max = highest
        inverse = rescale / row_sum
        store_rows(out, acc, inverse[:, None], begin, seq_len, N_HEADS * VALUE_DIM, BLOCK_M, VALUE_DIM, VALUE_PARTS)
    tl.store(lse + pair.to(tl.int64) * seq_len + i, (row_max + tl.log2(row_sum)) / LOG2_E, mask=i < seq_len)


@triton.jit
def attend_tile(
    acc, row_max, row_sum, q_tile, k, v, k_token, v_token, batch, kv_head, start, seq_len, i, begin, first, last,
    scale, softcap, slopes, slope, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, edge=None,
):  # fmt: skip
    """Add one tile of keys and values, from row `start` on, to (acc, row_max, row_sum). edge: with MASKED, True if this tile
    needs the mask; None: it does.
    """
    MASK_ROWS: tl.constexpr = MASKED and RAGGED  # the tile may reach beyond the sequence
    start = tl.multiple_of(start, BLOCK_N)
    j = start + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k, batch, kv_head, start, seq_len, k_token, BLOCK_N, HEAD_DIM, PARTS, MASK_ROWS, USE_TMA)
    score = dot_transposed(q_tile, k_tile, PARTS, PRECISION)
    v_tile = load_rows(v, batch, kv_head, start, seq_len, v_token, BLOCK_N, VALUE_DIM, VALUE_PARTS, MASK_ROWS, USE_TMA)
    if softcap is not None:
        score, _ = softcap_score(score, scale, softcap)
    elif slopes is not None:
        score = score * scale
    if slopes is not None and CAUSAL:
        # -slope * (i - j) = slope * (j - begin) - slope * (i - begin): the softmax does not depend on a term that is the same
        # for all keys of a query, so the second term is added to the log-sum-exp alone.
        score += (slope * (j - begin))[None, :]
    elif slopes is not None:
        score -= slope * tl.abs(i[:, None] - j[None, :])
    if edge is not None:
        if edge:
            score = tl.where(in_range(j[None, :], first[:, None], last[:, None], LOWER, UPPER), score, float("-inf"))
    elif MASKED:
        score = tl.where(in_range(j[None, :], first[:, None], last[:, None], LOWER, UPPER), score, float("-inf"))
    if softcap is None and slopes is None:
        # Scaled after the maximum, so that scaling and subtraction are one instruction.
        new_max = tl.maximum(row_max, tl.max(score, 1) * scale)
        weight = tl.exp2(score * scale - new_max[:, None])
    else:
        new_max = tl.maximum(row_max, tl.max(score, 1))
        weight = tl.exp2(score - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(weight, 1)
    rescaled = ()
    for part in tl.static_range(len(VALUE_PARTS)):
        rescaled = rescaled + (acc[part] * rescale[:, None],)
    return dot_accumulate(weight, v_tile, rescaled, VALUE_PARTS, PRECISION), new_max, row_sum
