"""The backward kernels of attention: one for dq, one for dk and dv, each with one writer per element: deterministic.

With P = exp(score - lse), dP = dO V^T, D = rowsum(dO * O) and dS = P * (dP - D) (FlashAttention-2, arXiv:2307.08691):
dV = P^T dO, dQ = scale dS K, dK = scale dS^T Q. ALiBi adds a constant, hence nothing; a softcap puts its derivative
into dS. The first kernel also makes D, from the dO that it reads anyway, for the second. Together 7 products of the
size of q k^T.
"""

import triton
import triton.language as tl

from llmtrain.kernels.attention.triton_tiles import (
    LOG2_E,
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
def attention_dq(
    q, k, v, out, dout, lse, dlse, delta, dq, slopes, starts, ends,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    seq_len, pairs, pairs_in_flight, scale, softcap, out_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, ONE_LOOP: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dq and delta = rowsum(dout * out) - dlse. Program: tile of queries x (sequence, head), as in the forward kernel.

    dq like q, contiguous; out, dout: [batch, T, n_heads, VALUE_DIM], out contiguous;
    lse, dlse (or None), delta: [batch, n_heads, T] in fp32. USE_TMA: k and v
    are tensor descriptors. out_scale: the scale of the score; scale and softcap: times log2(e). IN_REGISTERS: of q and dout, the
    first so many are read from registers in every product.
    """
    LOOK_BACK: tl.constexpr = None if WINDOW is None else WINDOW - 1
    LOOK_AHEAD: tl.constexpr = 0 if CAUSAL else LOOK_BACK
    LOWER: tl.constexpr = LOOK_BACK is not None or starts is not None
    UPPER: tl.constexpr = LOOK_AHEAD is not None or starts is not None or RAGGED
    tiles = tl.cdiv(seq_len, BLOCK_M)
    tile, pair = program_tile(tiles, pairs, pairs_in_flight)
    if CAUSAL:
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
    dout += batch.to(tl.int64) * do_batch + head * do_head
    here = (batch.to(tl.int64) * seq_len * N_HEADS + head) * HEAD_DIM
    out += here if VALUE_DIM == HEAD_DIM else here // HEAD_DIM * VALUE_DIM
    dq += here
    stats = pair.to(tl.int64) * seq_len + i
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E

    dout_tile = load_rows(dout, 0, 0, begin, seq_len, do_token, BLOCK_M, VALUE_DIM, VALUE_PARTS, True, False)
    sums = _delta(out, dout_tile, dlse, delta, pair, begin, seq_len, N_HEADS, BLOCK_M, VALUE_DIM, VALUE_PARTS)

    q_tile = load_rows(q, 0, 0, begin, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, True, False)
    if IN_REGISTERS > 0:
        q_tile = in_registers(q_tile, BLOCK_M, PARTS)
    if IN_REGISTERS > 1:
        dout_tile = in_registers(dout_tile, BLOCK_M, VALUE_PARTS)
    lse_log2 = tl.load(lse + stats, mask=i < seq_len, other=0.0) * LOG2_E
    if slopes is not None and CAUSAL:
        lse_log2 += slope * (i - begin)
    first, last = visible_range(i, starts, ends, seq_len, LOOK_BACK, LOOK_AHEAD)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, LOOK_BACK, LOOK_AHEAD)
    acc = zeros(BLOCK_M, PARTS)
    if LOWER and not ONE_LOOP:
        for start in tl.range(a, b, BLOCK_N, num_stages=NUM_STAGES):
            acc = _add_dq(
                acc, q_tile, dout_tile, lse_log2, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
                i, begin, first, last, scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION,
            )  # fmt: skip
    # Tiles that need no mask; with ONE_LOOP all of them.
    for start in tl.range(a if ONE_LOOP else b, end if ONE_LOOP else c, BLOCK_N, num_stages=NUM_STAGES):
        acc = _add_dq(
            acc, q_tile, dout_tile, lse_log2, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
            i, begin, first, last, scale, softcap, slopes, slope, ONE_LOOP, CAUSAL, LOWER, UPPER, RAGGED,
            BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION, (start < b) | (start >= c) if ONE_LOOP else None,
        )  # fmt: skip
    if UPPER and not ONE_LOOP:
        for start in tl.range(c, end, BLOCK_N, num_stages=NUM_STAGES):
            acc = _add_dq(
                acc, q_tile, dout_tile, lse_log2, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
                i, begin, first, last, scale, softcap, slopes, slope, True, CAUSAL, LOWER, UPPER, RAGGED,
                BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION,
            )  # fmt: skip
    store_rows(dq, acc, out_scale, begin, seq_len, N_HEADS * HEAD_DIM, BLOCK_M, HEAD_DIM, PARTS)


@triton.jit
def _add_dq(
    acc, q_tile, dout_tile, lse_log2, sums, k, v, k_token, v_token, batch, kv_head, start, seq_len,
    i, begin, first, last, scale, softcap, slopes, slope, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, edge=None,
):  # fmt: skip
    """Add one tile of keys and values to acc = dS K."""
    MASK_ROWS: tl.constexpr = MASKED and RAGGED  # the tile may reach beyond the sequence
    start = tl.multiple_of(start, BLOCK_N)
    j = start + tl.arange(0, BLOCK_N)
    k_tile = load_rows(k, batch, kv_head, start, seq_len, k_token, BLOCK_N, HEAD_DIM, PARTS, MASK_ROWS, USE_TMA)
    score = dot_transposed(q_tile, k_tile, PARTS, PRECISION)
    v_tile = load_rows(v, batch, kv_head, start, seq_len, v_token, BLOCK_N, VALUE_DIM, VALUE_PARTS, MASK_ROWS, USE_TMA)
    dweight = dot_transposed(dout_tile, v_tile, VALUE_PARTS, PRECISION)
    visible = in_range(j[None, :], first[:, None], last[:, None], LOWER, UPPER)
    weight, d_softcap = _weights(
        score, lse_log2[:, None], (j - begin)[None, :], i[:, None] - j[None, :], visible,
        scale, softcap, slopes, slope, MASKED, CAUSAL, edge,
    )  # fmt: skip
    dscore = weight * (dweight - sums[:, None])
    if softcap is not None:
        dscore *= d_softcap
    return dot_accumulate(dscore, k_tile, acc, PARTS, PRECISION)


@jit
def attention_dkdv(
    q, k, v, dout, lse, delta, dk, dv, slopes, starts, ends,
    q_batch, q_token, q_head, k_batch, k_token, k_head, v_batch, v_token, v_head, do_batch, do_token, do_head,
    seq_len, pairs, pairs_in_flight, scale, softcap, out_scale,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, RAGGED: tl.constexpr,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, DV_FIRST: tl.constexpr, SINGLE_LOOP: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, ONE_LOOP: tl.constexpr, IN_REGISTERS: tl.constexpr,
):  # fmt: skip
    """dk and dv, summed over HEADS query heads that share keys. Program: tile of BLOCK_N keys x (sequence, HEADS query heads).

    Arguments as of attention_dq, which has written delta; dk: [batch, T, n_heads / HEADS, head_dim] and dv: [batch, T,
    n_heads / HEADS, VALUE_DIM], contiguous; without DK or DV the other alone.
    USE_TMA: q and dout are tensor descriptors. Scores are kept with keys as rows: weights and their
    gradients are then left operands, from registers. The early keys, which the most queries see, start first.

    DV_FIRST: dO V^T is computed after P^T dO, where there are not registers enough for both. SINGLE_LOOP: every tile is masked,
    in one loop, which takes fewer registers than one loop with masks and one without; with ONE_LOOP those alone that need it.
    IN_REGISTERS: of k and v, the first so many are read from registers in every product.
    """
    # The queries that see a key: the other direction in time.
    LOOK_AHEAD: tl.constexpr = None if WINDOW is None else WINDOW - 1
    LOOK_BACK: tl.constexpr = 0 if CAUSAL else LOOK_AHEAD
    LOWER: tl.constexpr = LOOK_BACK is not None or starts is not None
    UPPER: tl.constexpr = LOOK_AHEAD is not None or starts is not None or RAGGED
    BLOCKS: tl.constexpr = N_HEADS // HEADS
    tile, pair = program_tile(tl.cdiv(seq_len, BLOCK_N), pairs, pairs_in_flight)
    batch, block = pair // BLOCKS, pair % BLOCKS
    head = block * HEADS
    kv_head = head // GROUP
    begin = tile * BLOCK_N
    j = begin + tl.arange(0, BLOCK_N)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    k += batch.to(tl.int64) * k_batch + kv_head * k_head
    v += batch.to(tl.int64) * v_batch + kv_head * v_head
    if not USE_TMA:
        q += batch.to(tl.int64) * q_batch
        dout += batch.to(tl.int64) * do_batch
    lse += batch.to(tl.int64) * (N_HEADS * seq_len)
    delta += batch.to(tl.int64) * (N_HEADS * seq_len)
    here = (batch.to(tl.int64) * seq_len * BLOCKS + block) * HEAD_DIM

    k_tile = load_rows(k, 0, 0, begin, seq_len, k_token, BLOCK_N, HEAD_DIM, PARTS, True, False)
    v_tile = k_tile
    if DK:
        v_tile = load_rows(v, 0, 0, begin, seq_len, v_token, BLOCK_N, VALUE_DIM, VALUE_PARTS, True, False)
    if IN_REGISTERS > 0:
        k_tile = in_registers(k_tile, BLOCK_N, PARTS)
    if IN_REGISTERS > 1:
        v_tile = in_registers(v_tile, BLOCK_N, VALUE_PARTS if DK else PARTS)
    first, last = visible_range(j, starts, ends, seq_len, LOOK_BACK, LOOK_AHEAD)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_N, BLOCK_M, LOOK_BACK, LOOK_AHEAD)
    dk_acc, dv_acc = zeros(BLOCK_N, PARTS), zeros(BLOCK_N, VALUE_PARTS)
    if LOWER and not SINGLE_LOOP:
        dk_acc, dv_acc = _add_queries(
            dk_acc, dv_acc, a, b, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head,
            batch, head, seq_len, j, begin, first, last, scale, softcap, slopes, True, CAUSAL, LOWER, UPPER, RAGGED,
            BLOCK_M, NUM_STAGES, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION, HEADS, DV_FIRST, DK, DV,
        )  # fmt: skip
    # All tiles with SINGLE_LOOP, else those that need no mask.
    dk_acc, dv_acc = _add_queries(
        dk_acc, dv_acc, a if SINGLE_LOOP else b, end if SINGLE_LOOP else c, k_tile, v_tile, q, dout, lse, delta,
        q_token, q_head, do_token, do_head,
        batch, head, seq_len, j, begin, first, last, scale, softcap, slopes, SINGLE_LOOP, CAUSAL, LOWER, UPPER, RAGGED,
        BLOCK_M, NUM_STAGES, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION, HEADS, DV_FIRST, DK, DV,
        b if ONE_LOOP else None, c,
    )  # fmt: skip
    if UPPER and not SINGLE_LOOP:
        dk_acc, dv_acc = _add_queries(
            dk_acc, dv_acc, c, end, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head,
            batch, head, seq_len, j, begin, first, last, scale, softcap, slopes, True, CAUSAL, LOWER, UPPER, RAGGED,
            BLOCK_M, NUM_STAGES, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, USE_TMA, PRECISION, HEADS, DV_FIRST, DK, DV,
        )  # fmt: skip
    if DK:
        store_rows(dk + here, dk_acc, out_scale, begin, seq_len, BLOCKS * HEAD_DIM, BLOCK_N, HEAD_DIM, PARTS)
    if DV:
        values = here if VALUE_DIM == HEAD_DIM else here // HEAD_DIM * VALUE_DIM
        store_rows(dv + values, dv_acc, 1.0, begin, seq_len, BLOCKS * VALUE_DIM, BLOCK_N, VALUE_DIM, VALUE_PARTS)


@triton.jit
def _add_queries(
    dk_acc, dv_acc, start, end, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head,
    batch, head, seq_len, j, begin, first, last, scale, softcap, slopes, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, NUM_STAGES: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, HEADS: tl.constexpr, DV_FIRST: tl.constexpr,
    DK: tl.constexpr, DV: tl.constexpr, b=None, c=None,
):  # fmt: skip
    """Add the tiles of queries from `start` to `end` of the heads from `head` on to dk_acc and dv_acc. b, c: with MASKED, the mask
    is needed before b and from c on; None: everywhere.

    One loop over heads and tiles: Triton does not pipeline a loop across the iterations of another.
    """
    if HEADS == 1:
        for at in tl.range(start, end, BLOCK_M, num_stages=NUM_STAGES):
            dk_acc, dv_acc = _add_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head,
                batch, head, at, seq_len, j, begin, first, last, scale, softcap, slopes,
                MASKED, CAUSAL, LOWER, UPPER, RAGGED, BLOCK_M, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS,
                USE_TMA, PRECISION, DV_FIRST, DK, DV,
                None if b is None else (at < b) | (at >= c),
            )  # fmt: skip
    else:
        at = start
        for _ in tl.range(0, HEADS * tl.cdiv(end - start, BLOCK_M), num_stages=NUM_STAGES):
            dk_acc, dv_acc = _add_dkdv(
                dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head,
                batch, head, at, seq_len, j, begin, first, last, scale, softcap, slopes,
                MASKED, CAUSAL, LOWER, UPPER, RAGGED, BLOCK_M, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS,
                USE_TMA, PRECISION, DV_FIRST, DK, DV,
                None if b is None else (at < b) | (at >= c),
            )  # fmt: skip
            at += BLOCK_M
            head += tl.where(at < end, 0, 1)
            at = tl.where(at < end, at, start)
    return dk_acc, dv_acc


@triton.jit
def _add_dkdv(
    dk_acc, dv_acc, k_tile, v_tile, q, dout, lse, delta, q_token, q_head, do_token, do_head, batch, head, start, seq_len,
    j, begin, first, last, scale, softcap, slopes, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    LOWER: tl.constexpr, UPPER: tl.constexpr, RAGGED: tl.constexpr,
    BLOCK_M: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    USE_TMA: tl.constexpr, PRECISION: tl.constexpr, DV_FIRST: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, edge=None,
):  # fmt: skip
    """Add one tile of queries to dk_acc = dS^T Q and dv_acc = P^T dO."""
    MASK_ROWS: tl.constexpr = MASKED and RAGGED  # the tile may reach beyond the sequence
    start = tl.multiple_of(start, BLOCK_M)
    i = start + tl.arange(0, BLOCK_M)
    if not USE_TMA:
        q += head * q_head
        dout += head * do_head
    lse += head * seq_len
    delta += head * seq_len
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E
    q_tile = load_rows(q, batch, head, start, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, MASK_ROWS, USE_TMA)
    score = dot_transposed(k_tile, q_tile, PARTS, PRECISION)
    if DK and not DV_FIRST:
        dout_tile = load_rows(
            dout, batch, head, start, seq_len, do_token, BLOCK_M, VALUE_DIM, VALUE_PARTS, MASK_ROWS, USE_TMA
        )
        dweight = dot_transposed(v_tile, dout_tile, VALUE_PARTS, PRECISION)
    lse_log2 = tl.load(lse + i, mask=i < seq_len if MASK_ROWS else None, other=0.0 if MASK_ROWS else None) * LOG2_E
    if slopes is not None and CAUSAL:
        lse_log2 += slope * (i - begin)
    visible = in_range(i[None, :], first[:, None], last[:, None], LOWER, UPPER)
    weight, d_softcap = _weights(
        score, lse_log2[None, :], (j - begin)[:, None], i[None, :] - j[:, None], visible,
        scale, softcap, slopes, slope, MASKED, CAUSAL, edge,
    )  # fmt: skip
    if DV_FIRST or not DK:
        dout_tile = load_rows(
            dout, batch, head, start, seq_len, do_token, BLOCK_M, VALUE_DIM, VALUE_PARTS, MASK_ROWS, USE_TMA
        )
    if DV:
        dv_acc = dot_accumulate(weight, dout_tile, dv_acc, VALUE_PARTS, PRECISION)
    if DK:
        if DV_FIRST:
            dweight = dot_transposed(v_tile, dout_tile, VALUE_PARTS, PRECISION)
        # Loaded late: it takes as many registers as a score has columns.
        sums = tl.load(delta + i, mask=i < seq_len if MASK_ROWS else None, other=0.0 if MASK_ROWS else None)
        dscore = weight * (dweight - sums[None, :])
        if softcap is not None:
            dscore *= d_softcap
        dk_acc = dot_accumulate(dscore, q_tile, dk_acc, PARTS, PRECISION)
    return dk_acc, dv_acc


@triton.jit
def _weights(
    score, lse_log2, column, distance, visible, scale, softcap, slopes, slope, MASKED: tl.constexpr,
    CAUSAL: tl.constexpr, edge=None,
):  # fmt: skip
    """exp(score - lse) from q k^T, and the softcap's derivative; for scores with queries or with keys as rows.

    lse_log2: log2(e) lse, plus the part of ALiBi that is the same for all keys of a query; column: the key's position, for the
    other part.
    """
    d_softcap = score
    if softcap is not None:
        score, d_softcap = softcap_score(score, scale, softcap)
    else:
        score = score * scale
    if slopes is not None and CAUSAL:
        score = score + slope * column
    elif slopes is not None:
        score = score - slope * tl.abs(distance)
    weight = tl.exp2(score - lse_log2)
    if edge is not None:
        if edge:
            weight = tl.where(visible, weight, 0.0)
    elif MASKED:
        # After the exponential, which is infinite for a query that sees nothing (lse = -inf).
        weight = tl.where(visible, weight, 0.0)
    return weight, d_softcap


@triton.jit
def _delta(
    out, dout_tile, dlse, delta, pair, begin, seq_len,
    N_HEADS: tl.constexpr, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """rowsum(dout * out) - dlse of one tile of queries, stored and returned. out: pointer to this sequence and head."""
    i = begin + tl.arange(0, ROWS)
    stats = pair.to(tl.int64) * seq_len + i
    outs = load_rows(out, 0, 0, begin, seq_len, N_HEADS * HEAD_DIM, ROWS, HEAD_DIM, PARTS, True, False)
    sums = tl.zeros((ROWS,), tl.float32)
    for part in tl.static_range(len(PARTS)):
        sums += tl.sum(dout_tile[part].to(tl.float32) * outs[part].to(tl.float32), 1)
    if dlse is not None:
        sums -= tl.load(dlse + stats, mask=i < seq_len, other=0.0)
    tl.store(delta + stats, sums, mask=i < seq_len)
    return sums
