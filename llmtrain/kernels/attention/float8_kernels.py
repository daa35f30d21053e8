"""The kernels of attention in float8, forward and backward: those of triton_forward.py and triton_backward.py with operands from
float8_quantise.py.

Every product is of two float8 tiles and summed in fp32. The scales of a pair of blocks are one factor of their scores; that of a
block of values is put right in the accumulator, which is multiplied anyway, and those of the backward pass in the weights, which
are as large as float8 is precise for. Causal attention of one width, with ALiBi, windows and documents; p are weights before
they are divided by their sum.
"""

import triton
import triton.language as tl

from llmtrain.kernels.attention.float8_quantise import reordered
from llmtrain.kernels.attention.triton_tiles import LOG2_E, LOWEST, in_range, program_tile, tile_ranges, visible_range
from llmtrain.kernels.launch import jit


@triton.jit
def _load(source, row, column, stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr, USE_TMA: tl.constexpr):
    """Tile of a matrix: a tensor descriptor, or a pointer to the first element with the stride of rows."""
    if USE_TMA:
        return source.load([row, column])
    else:
        base = source + row.to(tl.int64) * stride + column
        return tl.load(base + tl.arange(0, ROWS)[:, None] * stride + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def _largest(scales, pair, padded, SIZE: tl.constexpr, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Largest of the scales of COUNT pairs of sequence and head."""
    at = tl.arange(0, SIZE)
    blocks = padded // BLOCK
    return tl.max(tl.load(scales + pair * blocks + at, mask=at < COUNT * blocks, other=0.0), 0)


@triton.jit
def _store(target, tile, begin, seq_len, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr):
    row = begin + tl.arange(0, ROWS)
    at = target + row[:, None] * stride + tl.arange(0, HEAD_DIM)[None, :]
    tl.store(at, tile.to(target.dtype.element_ty), mask=(row < seq_len)[:, None])


@jit
def float8_forward(
    q, k, v, out, row_max, row_inverse, q_scales, k_scales, v_scales, slopes, starts, ends,
    seq_len, padded, pairs, pairs_in_flight, scale,
    WINDOW: tl.constexpr, N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK: tl.constexpr, REORDERED: tl.constexpr, LARGEST: tl.constexpr,
):  # fmt: skip
    """out [batch, T, N_HEADS, HEAD_DIM], contiguous; row_max (in powers of two) and row_inverse, one over the sum of exponentials,
    [batch, N_HEADS, padded] in fp32. Program: tile of queries x (sequence, head).

    q, k: rows, v: columns, of float8_quantise.py, with their scales. USE_TMA: these are tensor descriptors. scale: times log2(e).
    """
    LOOK_BACK: tl.constexpr = None if WINDOW is None else WINDOW - 1
    LOWER: tl.constexpr = LOOK_BACK is not None or starts is not None
    SHIFT: tl.constexpr = 8 if LARGEST > 256 else 7  # of p, to where float8 is precise
    tiles = tl.cdiv(seq_len, BLOCK_M)
    tile, pair = program_tile(tiles, pairs, pairs_in_flight)
    tile = tiles - 1 - tile  # late queries see the most keys
    batch, head = pair // N_HEADS, pair % N_HEADS
    kv_pair = pair // N_HEADS * (N_HEADS // GROUP) + head // GROUP
    begin = tile * BLOCK_M
    i = begin + tl.arange(0, BLOCK_M)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    k_scales += kv_pair * (padded // BLOCK)
    v_scales += kv_pair * (padded // BLOCK)
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E
    q_tile = _load(q, pair * padded + begin, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
    q_scale = tl.load(q_scales + pair * (padded // BLOCK) + begin // BLOCK) * scale
    first, last = visible_range(i, starts, ends, seq_len, LOOK_BACK, 0)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, LOOK_BACK, 0)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    highest = tl.full((BLOCK_M,), LOWEST, tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    v_before = 1.0
    for start in tl.range(a, end, BLOCK_N, num_stages=NUM_STAGES):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        k_tile = _load(k, kv_pair * padded + start, 0, HEAD_DIM, BLOCK_N, HEAD_DIM, USE_TMA)
        score = tl.dot(q_tile, tl.trans(k_tile))
        factor = q_scale * tl.load(k_scales + start // BLOCK)
        v_now = tl.load(v_scales + start // BLOCK)
        v_tile = _load(v, kv_pair * HEAD_DIM, start, padded, HEAD_DIM, BLOCK_N, USE_TMA)
        if slopes is not None:
            # The rest of ALiBi, the same for all keys of a query, is added to row_max alone.
            score = score * factor + (slope * (j - begin))[None, :]
        if (start < b) | (start >= c):
            score = tl.where(in_range(j[None, :], first[:, None], last[:, None], LOWER, True), score, float("-inf"))
        if slopes is None:
            # Scaled after the maximum, so that scaling and subtraction are one instruction.
            now = tl.maximum(highest, tl.max(score, 1) * factor)
            weight = tl.exp2(score * factor - (now - SHIFT)[:, None])
        else:
            now = tl.maximum(highest, tl.max(score, 1))
            weight = tl.exp2(score - (now - SHIFT)[:, None])
        rescale = tl.exp2(highest - now)
        total = total * rescale + tl.sum(weight, 1)
        acc = acc * (rescale * (v_before / v_now))[:, None]
        weight = reordered(weight.to(v_tile.dtype), BLOCK_M, BLOCK_N, REORDERED)
        acc = tl.dot(weight, tl.trans(v_tile), acc)
        highest, v_before = now, v_now
    seen = (total > 0) & (i < seq_len)  # padding between documents sees nothing
    total = tl.where(seen, total, 1.0)
    out += (batch.to(tl.int64) * seq_len * N_HEADS + head) * HEAD_DIM
    _store(out, acc * (v_before / total)[:, None], begin, seq_len, N_HEADS * HEAD_DIM, BLOCK_M, HEAD_DIM)
    if slopes is not None:
        highest -= slope * (i - begin)
    tl.store(row_max + pair * padded + i, tl.where(seen, highest, 0.0))
    tl.store(row_inverse + pair * padded + i, tl.where(seen, (1 << SHIFT) / total, 0.0))


@jit
def float8_dq(
    q, dout, k, k_columns, v, row_max, delta, factor, dq, q_scales, k_scales, k_column_scales, v_scales, slopes, starts, ends,
    seq_len, padded, pairs, pairs_in_flight, scale, out_scale,
    WINDOW: tl.constexpr, N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK: tl.constexpr, REORDERED: tl.constexpr, LARGEST: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """dq [batch, T, N_HEADS, HEAD_DIM], contiguous. Program: tile of queries x (sequence, head). The other arguments as of
    float8_forward and quantise_gradients. SCALES: a power of two, at least as many as a head has blocks."""
    LOOK_BACK: tl.constexpr = None if WINDOW is None else WINDOW - 1
    LOWER: tl.constexpr = LOOK_BACK is not None or starts is not None
    tiles = tl.cdiv(seq_len, BLOCK_M)
    tile, pair = program_tile(tiles, pairs, pairs_in_flight)
    tile = tiles - 1 - tile
    batch, head = pair // N_HEADS, pair % N_HEADS
    kv_pair = batch * (N_HEADS // GROUP) + head // GROUP
    begin = tile * BLOCK_M
    i = begin + tl.arange(0, BLOCK_M)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    largest = _largest(v_scales, kv_pair, padded, SCALES, 1, BLOCK)
    largest *= _largest(k_column_scales, kv_pair, padded, SCALES, 1, BLOCK)
    # Brings p (dO V^T u - delta), at most 2 LARGEST^2 by the norms of its rows, below LARGEST.
    unit = 1.0 / (2.0 * LARGEST * largest)
    k_scales += kv_pair * (padded // BLOCK)
    k_column_scales += kv_pair * (padded // BLOCK)
    v_scales += kv_pair * (padded // BLOCK)
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E
    q_tile = _load(q, pair * padded + begin, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
    dout_tile = _load(dout, pair * padded + begin, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
    q_scale = tl.load(q_scales + pair * (padded // BLOCK) + begin // BLOCK) * scale
    highest, sums = tl.load(row_max + pair * padded + i), tl.load(delta + pair * padded + i)
    if slopes is not None:
        highest += slope * (i - begin)
    first, last = visible_range(i, starts, ends, seq_len, LOOK_BACK, 0)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, LOOK_BACK, 0)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in tl.range(a, end, BLOCK_N, num_stages=NUM_STAGES):
        start = tl.multiple_of(start, BLOCK_N)
        j = start + tl.arange(0, BLOCK_N)
        k_tile = _load(k, kv_pair * padded + start, 0, HEAD_DIM, BLOCK_N, HEAD_DIM, USE_TMA)
        score = tl.dot(q_tile, tl.trans(k_tile))
        v_tile = _load(v, kv_pair * padded + start, 0, HEAD_DIM, BLOCK_N, HEAD_DIM, USE_TMA)
        dweight = tl.dot(dout_tile, tl.trans(v_tile))
        score = score * (q_scale * tl.load(k_scales + start // BLOCK))
        if slopes is not None:
            score += (slope * (j - begin))[None, :]
        weight = tl.exp2(score - highest[:, None])
        if (start < b) | (start >= c):
            weight = tl.where(in_range(j[None, :], first[:, None], last[:, None], LOWER, True), weight, 0.0)
        here = unit * tl.load(k_column_scales + start // BLOCK)
        dweight = dweight * (here * tl.load(v_scales + start // BLOCK)) - (sums * here)[:, None]
        k_tile = _load(k_columns, kv_pair * HEAD_DIM, start, padded, HEAD_DIM, BLOCK_N, USE_TMA)
        dscore = reordered((weight * dweight).to(k_tile.dtype), BLOCK_M, BLOCK_N, REORDERED)
        acc = tl.dot(dscore, tl.trans(k_tile), acc)
    acc = acc * (tl.load(factor + pair * padded + i) * (out_scale / unit))[:, None]
    dq += (batch.to(tl.int64) * seq_len * N_HEADS + head) * HEAD_DIM
    _store(dq, acc, begin, seq_len, N_HEADS * HEAD_DIM, BLOCK_M, HEAD_DIM)


@jit
def float8_dkdv(
    q, q_columns, dout, dout_columns, k, v, row_max, delta, dk, dv,
    q_scales, q_column_scales, do_column_scales, k_scales, v_scales, slopes, starts, ends,
    seq_len, padded, pairs, pairs_in_flight, scale, out_scale,
    WINDOW: tl.constexpr, N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, USE_TMA: tl.constexpr,
    BLOCK: tl.constexpr, REORDERED: tl.constexpr, LARGEST: tl.constexpr, SCALES: tl.constexpr, HEADS: tl.constexpr,
    DV_FIRST: tl.constexpr,
):  # fmt: skip
    """dk and dv [batch, T, N_HEADS / HEADS, HEAD_DIM], contiguous, each summed over HEADS query heads that share keys. Program:
    tile of BLOCK_N keys x (sequence, HEADS query heads). SCALES: as of float8_dq, for HEADS heads. DV_FIRST: dO V^T comes
    after P^T dO.
    """
    LOOK_AHEAD: tl.constexpr = None if WINDOW is None else WINDOW - 1
    UPPER: tl.constexpr = LOOK_AHEAD is not None or starts is not None
    BLOCKS: tl.constexpr = N_HEADS // HEADS
    SHIFT: tl.constexpr = 8 if LARGEST > 256 else 7
    tile, block = program_tile(tl.cdiv(seq_len, BLOCK_N), pairs, pairs_in_flight)
    batch, head = block // BLOCKS, block % BLOCKS * HEADS
    kv_pair = batch * (N_HEADS // GROUP) + head // GROUP
    first_pair = batch * N_HEADS + head
    begin = tile * BLOCK_N
    j = begin + tl.arange(0, BLOCK_N)
    if starts is not None:
        starts += batch * seq_len
        ends += batch * seq_len
    do_unit = _largest(do_column_scales, first_pair, padded, SCALES, HEADS, BLOCK)
    q_unit = _largest(q_column_scales, first_pair, padded, SCALES, HEADS, BLOCK)
    unit = 1.0 / (2.0 * LARGEST * q_unit * _largest(v_scales, kv_pair, padded, SCALES, 1, BLOCK))
    k_tile = _load(k, kv_pair * padded + begin, 0, HEAD_DIM, BLOCK_N, HEAD_DIM, USE_TMA)
    v_tile = _load(v, kv_pair * padded + begin, 0, HEAD_DIM, BLOCK_N, HEAD_DIM, USE_TMA)
    k_scale = tl.load(k_scales + kv_pair * (padded // BLOCK) + begin // BLOCK) * scale
    v_scale = tl.load(v_scales + kv_pair * (padded // BLOCK) + begin // BLOCK)
    first, last = visible_range(j, starts, ends, seq_len, 0, LOOK_AHEAD)
    a, b, c, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_N, BLOCK_M, 0, LOOK_AHEAD)
    dk_acc = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    dv_acc = tl.zeros((BLOCK_N, HEAD_DIM), tl.float32)
    steps = tl.cdiv(end - a, BLOCK_M)
    for step in tl.range(0, HEADS * steps, num_stages=NUM_STAGES):
        pair = first_pair + step // steps if HEADS > 1 else first_pair
        start = tl.multiple_of(a + (step % steps if HEADS > 1 else step) * BLOCK_M, BLOCK_M)
        i = start + tl.arange(0, BLOCK_M)
        q_tile = _load(q, pair * padded + start, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
        score = tl.dot(k_tile, tl.trans(q_tile))
        if not DV_FIRST:
            dout_tile = _load(dout, pair * padded + start, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
            dweight = tl.dot(v_tile, tl.trans(dout_tile))
        at = pair * (padded // BLOCK) + start // BLOCK
        # p, shifted to where float8 is precise, in units of the block's scale of dO.
        share = tl.load(do_column_scales + at) / do_unit
        highest = tl.load(row_max + pair * padded + i) - (tl.log2(share) + SHIFT)
        score = score * (k_scale * tl.load(q_scales + at))
        if slopes is not None:
            slope = tl.load(slopes + pair % N_HEADS) * LOG2_E
            score += (slope * (j - begin))[:, None]
            highest += slope * (i - begin)
        weight = tl.exp2(score - highest[None, :])
        if (start < b) | (start >= c):
            weight = tl.where(in_range(i[None, :], first[:, None], last[:, None], True, UPPER), weight, 0.0)
        dout_tile = _load(dout_columns, pair * HEAD_DIM, start, padded, HEAD_DIM, BLOCK_M, USE_TMA)
        dv_acc = tl.dot(reordered(weight.to(dout_tile.dtype), BLOCK_N, BLOCK_M, REORDERED), tl.trans(dout_tile), dv_acc)
        if DV_FIRST:
            dout_tile = _load(dout, pair * padded + start, 0, HEAD_DIM, BLOCK_M, HEAD_DIM, USE_TMA)
            dweight = tl.dot(v_tile, tl.trans(dout_tile))
        here = unit * tl.load(q_column_scales + at) / (share * (1 << SHIFT))
        dweight = dweight * (here * v_scale) - (tl.load(delta + pair * padded + i) * here)[None, :]
        q_tile = _load(q_columns, pair * HEAD_DIM, start, padded, HEAD_DIM, BLOCK_M, USE_TMA)
        dscore = reordered((weight * dweight).to(q_tile.dtype), BLOCK_N, BLOCK_M, REORDERED)
        dk_acc = tl.dot(dscore, tl.trans(q_tile), dk_acc)
    here = (batch.to(tl.int64) * seq_len * BLOCKS + block % BLOCKS) * HEAD_DIM
    _store(dk + here, dk_acc * (out_scale / unit), begin, seq_len, BLOCKS * HEAD_DIM, BLOCK_N, HEAD_DIM)
    _store(dv + here, dv_acc * (do_unit / (1 << SHIFT)), begin, seq_len, BLOCKS * HEAD_DIM, BLOCK_N, HEAD_DIM)
