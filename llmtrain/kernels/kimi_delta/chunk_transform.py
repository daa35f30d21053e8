"""What a chunk's tokens are to one another and to the state: the triangular system (gated_delta/chunk_transform.py), the scores of
queries, and queries and keys times their decays."""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside
from llmtrain.kernels.gated_delta.chunk_transform import solve
from llmtrain.kernels.kimi_delta.chunk_decays import (
    LEAST,
    NEAR,
    met,
    of_borders,
    on_diagonal,
    seen_pairs,
    side_by_side,
    to_middle,
)


@triton.jit
def _far(
    R, A, q, k, G, dtype: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """Adds the products of pairs that meet in blocks of S, [C, C]."""
    o = tl.arange(0, C)
    decay = to_middle(G, C, S, BK)
    keys = (k * decay).to(dtype)
    pairs = met(o[:, None], o[None, :], S)
    R += tl.where(pairs, tl.dot((q * decay).to(dtype), tl.trans(keys), input_precision=PRECISION), 0.0)
    A += tl.where(pairs, tl.dot(keys, tl.trans(keys), input_precision=PRECISION), 0.0)
    return R, A


@triton.jit
def _near(
    R, A, q, k, G, dtype: tl.constexpr, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr, PRECISION: tl.constexpr
):
    """The same for S of at most 16, [C / 16, 16, 16]."""
    r = tl.arange(0, NEAR)
    decay = to_middle(G, C, S, BK)
    keys = side_by_side((k * decay).to(dtype), C, BK)
    queries, turned = side_by_side((q * decay).to(dtype), C, BK), tl.permute(keys, (0, 2, 1))
    pairs = met(r[:, None], r[None, :], S)[None, :, :]
    R += tl.where(pairs, tl.dot(queries, turned, input_precision=PRECISION), 0.0)
    A += tl.where(pairs, tl.dot(keys, turned, input_precision=PRECISION), 0.0)
    return R, A


@triton.jit
def chunk_transform_kernel(
    q, k, log_decay, beta, ids, transform, scores, weights, sums, whole, q_start, k_start, k_end,
    T, padded, q_row, k_row,
    q_token: tl.constexpr, k_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """q, k: [rows, T, H / SHARE, K] by strides of rows and tokens -> U and the scores (q_i . k_j) decay_ij, [rows, T, H, C]; in
    fp32 beta [rows, H, padded], the running sums of log_decay in the chunk [rows, padded, H, K] and the decays of whole chunks
    [rows, chunks, H, K]; queries and keys times the decay from the start of the chunk, and keys times that to its end,
    [rows, T, H, K]. Behind the text log_decay and beta are 0."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    begin = chunk * C
    there = o < T - begin
    out = (row * T + begin) * H + head
    b = tl.load(beta + out + o * H, mask=there, other=0.0).to(tl.float32)
    tl.store(weights + (row * H + head) * padded + begin + o, b)
    q += row * q_row + begin.to(tl.int64) * q_token + (head // SHARE) * K
    k += row * k_row + begin.to(tl.int64) * k_token + (head // SHARE) * K
    log_decay += out * K
    sums += ((row * padded + begin) * H + head) * K
    whole += ((row * (padded // C) + chunk) * H + head) * K
    dtype = k.dtype.element_ty
    far_R, far_A = tl.zeros((C, C), dtype=tl.float32), tl.zeros((C, C), dtype=tl.float32)
    near_R = tl.zeros((C // NEAR, NEAR, NEAR), dtype=tl.float32)
    near_A = tl.zeros((C // NEAR, NEAR, NEAR), dtype=tl.float32)
    itself = tl.zeros((C // NEAR, NEAR), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys, to = there[:, None] & inside(c, K, BK)[None, :], o[:, None] * (H * K) + c[None, :]
        found = tl.load(log_decay + to, mask=of_keys, other=0.0).to(tl.float32)
        queries = tl.load(q + o[:, None] * q_token + c[None, :], mask=of_keys, other=0.0).to(tl.float32)
        keys = tl.load(k + o[:, None] * k_token + c[None, :], mask=of_keys, other=0.0).to(tl.float32)
        found = tl.maximum(found, LEAST)
        G, total = tl.cumsum(found, 0), tl.sum(found, 0)
        from_start, to_end, of_chunk = of_borders(G, total, ids, row, chunk, T, C, DOCUMENTS)
        tl.store(sums + to, G, mask=inside(c, K, BK)[None, :])
        tl.store(whole + c, of_chunk, mask=inside(c, K, BK))
        tl.store(q_start + out * K + to, (queries * from_start).to(dtype), mask=of_keys)
        tl.store(k_start + out * K + to, (keys * from_start).to(dtype), mask=of_keys)
        tl.store(k_end + out * K + to, (keys * to_end).to(dtype), mask=of_keys)
        if C > 32:
            far_R, far_A = _far(far_R, far_A, queries, keys, G, dtype, C, 64, BK, PRECISION)
        if C > 16:
            far_R, far_A = _far(far_R, far_A, queries, keys, G, dtype, C, 32, BK, PRECISION)
        near_R, near_A = _near(near_R, near_A, queries, keys, G, dtype, C, 16, BK, PRECISION)
        near_R, near_A = _near(near_R, near_A, queries, keys, G, dtype, C, 8, BK, PRECISION)
        near_R, near_A = _near(near_R, near_A, queries, keys, G, dtype, C, 4, BK, PRECISION)
        near_R, near_A = _near(near_R, near_A, queries, keys, G, dtype, C, 2, BK, PRECISION)
        itself += tl.sum(side_by_side(queries * keys, C, BK), 2)
    r = tl.arange(0, NEAR)
    near_R += tl.where((r[:, None] == r[None, :])[None, :, :], itself[:, :, None], 0.0)
    seen = seen_pairs(ids, row, chunk, T, C, DOCUMENTS)
    R = tl.where(seen, far_R + on_diagonal(near_R, C), 0.0)
    A = tl.where(seen, far_A + on_diagonal(near_A, C), 0.0)
    U = solve(A, b, C, SOLVE_PRECISION)
    square = out * C + o[:, None] * (H * C) + o[None, :]
    tl.store(scores + square, R.to(dtype), mask=there[:, None])
    tl.store(transform + square, U.to(dtype), mask=there[:, None])
