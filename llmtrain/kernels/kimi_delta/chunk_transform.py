"""Products of queries and keys of a chunk's pairs of tokens, and the triangular system of the gated delta rule
(gated_delta/chunk_transform.py)."""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_transform import join_blocks, solve_blocks, square_below
from llmtrain.kernels.kimi_delta.chunk_decays import LEVELS, NEAR, load_border, load_rows, load_sums, met, to_middle
from llmtrain.kernels.launch import jit


@jit
def pair_products_kernel(
    q, k, sums, ids, scores, system,
    T, padded, q_row, k_row,
    q_token: tl.constexpr, k_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """16 rows of the scores (q_i . k_j) decay_ij, [rows, T, H, C], and of A = (k_i . k_j) decay_ij for i > j, the same in fp32."""
    block, chunk = tl.program_id(0), tl.program_id(1)
    row, head = (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    r = tl.arange(0, NEAR)
    begin, i = chunk * C, block * NEAR + r
    q += row * q_row + begin.to(tl.int64) * q_token + (head // SHARE) * K
    k += row * k_row + begin.to(tl.int64) * k_token + (head // SHARE) * K
    sums += ((row * padded + begin) * H + head) * K
    scores += ((row * T + begin) * H + head) * C
    system += ((row * T + begin) * H + head) * C
    below = T - begin
    if DOCUMENTS:
        own = tl.load(ids + row * T + tl.minimum(begin + i, T - 1))
    dtype = k.dtype.element_ty
    for other in range(C // NEAR):
        j = other * NEAR + r
        R, A = tl.zeros((NEAR, NEAR), dtype=tl.float32), tl.zeros((NEAR, NEAR), dtype=tl.float32)
        if other < block:
            for first in range(0, K, BK):
                c = first + tl.arange(0, BK)
                border = load_border(sums, other, c, H * K, K, BK)
                late = tl.exp(load_sums(sums, i, c, H * K, K, BK) - border)
                early = tl.exp(border - load_sums(sums, j, c, H * K, K, BK))
                queries, keys = load_rows(q, i, c, below, q_token, K, BK), load_rows(k, i, c, below, k_token, K, BK)
                turned = tl.trans((load_rows(k, j, c, below, k_token, K, BK) * early).to(dtype))
                R = tl.dot((queries * late).to(dtype), turned, R, input_precision=PRECISION)
                A = tl.dot((keys * late).to(dtype), turned, A, input_precision=PRECISION)
        if other == block:
            for first in range(0, K, BK):
                c = first + tl.arange(0, BK)
                G = load_sums(sums, i, c, H * K, K, BK)
                queries, keys = load_rows(q, i, c, below, q_token, K, BK), load_rows(k, i, c, below, k_token, K, BK)
                R += tl.where(r[:, None] == r[None, :], tl.sum(queries * keys, 1)[:, None], 0.0)
                for level in range(LEVELS):
                    decay = to_middle(G, sums, block, level, c, H * K, K, BK)
                    of_keys = (keys * decay).to(dtype)
                    turned, pairs = tl.trans(of_keys), met(level)
                    R += tl.where(pairs, tl.dot((queries * decay).to(dtype), turned, input_precision=PRECISION), 0.0)
                    A += tl.where(pairs, tl.dot(of_keys, turned, input_precision=PRECISION), 0.0)
        if DOCUMENTS:
            same = own[:, None] == tl.load(ids + row * T + tl.minimum(begin + j, T - 1))[None, :]
            R, A = tl.where(same, R, 0.0), tl.where(same, A, 0.0)
        square = i[:, None] * (H * C) + j[None, :]
        tl.store(scores + square, R.to(dtype), mask=(i < below)[:, None])
        tl.store(system + square, A, mask=(i < below)[:, None])


@triton.jit
def _squares(limit, down, across, token: tl.constexpr, N: tl.constexpr, S: tl.constexpr, EACH: tl.constexpr):
    """Offsets and mask of squares [N, S, S] of a matrix, one in every EACH rows, `down` and `across` from the diagonal's."""
    n, r = EACH * tl.arange(0, N)[:, None, None], tl.arange(0, S)
    rows = n + down + r[None, :, None]
    return rows * token + n + across + r[None, None, :], rows < limit


@triton.jit
def _load_squares(x, limit, down, token: tl.constexpr, N: tl.constexpr, S: tl.constexpr, EACH: tl.constexpr):
    at, mask = _squares(limit, down, 0, token, N, S, EACH)
    return tl.load(x + at, mask=mask, other=0.0)


@jit
def chunk_transform_kernel(
    system, beta, transform, weights, T, padded,
    H: tl.constexpr, C: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """A, and beta [rows, T, H] -> U, [rows, T, H, C], and beta in fp32, [rows, H, padded], which is 0 behind the text."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    limit = T - chunk * C
    out = (row * T + chunk * C) * H + head
    b = tl.load(beta + out + o * H, mask=o < limit, other=0.0).to(tl.float32)
    tl.store(weights + (row * H + head) * padded + chunk * C + o, b)
    system += out * C
    transform += out * C
    dtype = transform.dtype.element_ty
    U = solve_blocks(_load_squares(system, limit, 0, H * C, C // NEAR, NEAR, NEAR), b, C)
    if C > 32:
        U = join_blocks(U, _load_squares(system, limit, 16, H * C, C // 32, 16, 32), b, C, 16, SOLVE_PRECISION)
    # The last square below the diagonal is stored without joining it, which would take many registers.
    if C > 16:
        HALF: tl.constexpr = C // 2
        at, mask = _squares(limit, HALF, 0, H * C, 1, HALF, C)
        below = tl.load(system + at, mask=mask, other=0.0)
        tl.store(transform + at, square_below(U, below, b, C, HALF, SOLVE_PRECISION).to(dtype), mask=mask)
        at, mask = _squares(limit, 0, HALF, H * C, 1, HALF, C)
        tl.store(transform + at, tl.zeros((1, HALF, HALF), dtype=dtype), mask=mask)
        at, mask = _squares(limit, 0, 0, H * C, 2, HALF, HALF)
        tl.store(transform + at, U.to(dtype), mask=mask)
    else:
        at, mask = _squares(limit, 0, 0, H * C, 1, C, C)
        tl.store(transform + at, U.to(dtype), mask=mask)
