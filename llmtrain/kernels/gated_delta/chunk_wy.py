"""The WY representation of a chunk (Yang et al., arXiv:2412.06464, section 3.3), and its gradient.

(I + A) [u, w] = beta [v, from_start k], A_ij = beta_i (k_i . k_j) decay_ij for i > j: what each token writes along its key,
had the chunk begun with a state of zeros, and what it writes less for each element of the state that it begins with.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import boundary_decays, load_decays, pair_decays


@triton.jit
def _invert(A, C: tl.constexpr, PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A, [C, C] in fp32: row by row in blocks of up to 32, and then what two blocks
    have between them."""
    BLOCK: tl.constexpr = min(C, 32)
    N: tl.constexpr = C // BLOCK
    tl.static_assert(N <= 2)
    n, r = tl.arange(0, N), tl.arange(0, BLOCK)
    blocks = tl.reshape(A, (N, BLOCK, N, BLOCK))
    on_diagonal = n[:, None, None, None] == n[None, None, :, None]
    diagonal = tl.sum(tl.where(on_diagonal, blocks, 0.0), 2)  # [N, BLOCK, BLOCK]
    # Rows of the inverse's part below the diagonal: x_i = -a_i - sum over m < i of a_im x_m.
    solved = tl.zeros((N, BLOCK, BLOCK), dtype=tl.float32)
    for i in range(1, BLOCK):
        this = r[None, :, None] == i
        a = tl.sum(tl.where(this, diagonal, 0.0), 1)  # [N, BLOCK]
        row = -a - tl.sum(a[:, :, None] * solved, 1)
        solved = tl.where(this, row[:, None, :], solved)
    solved += tl.where(r[None, :, None] == r[None, None, :], 1.0, 0.0)
    inverse = tl.where(on_diagonal, solved[:, :, None, :], 0.0)
    if N == 2:
        at_left = n[None, None, :, None] == 0
        below = tl.sum(tl.sum(tl.where(at_left & (n[:, None, None, None] == 1), blocks, 0.0), 2), 0)
        first = tl.sum(tl.where(n[:, None, None] == 0, solved, 0.0), 0)
        second = tl.sum(tl.where(n[:, None, None] == 1, solved, 0.0), 0)
        between = tl.dot(second, tl.dot(below, first, input_precision=PRECISION), input_precision=PRECISION)
        here = at_left & (n[:, None, None, None] == 1)
        inverse = tl.where(here, -between[None, :, None, :], inverse)
    return tl.reshape(inverse, (C, C))


@triton.jit
def chunk_wy_kernel(
    k, v, log_decay, beta, ids, inverse, w, u,
    T, k_row, k_token, v_row, v_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """k: [rows, T, H / SHARE, K], v: [rows, T, H, V], by strides of rows and tokens -> inverse [rows, T, H, C], w like v with K
    channels, u like v."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    t = chunk * C + o
    there = t < T
    out = (row * T + t) * H + head
    g, total = load_decays(log_decay, row, head, chunk, T, H, C)
    from_start, _, _ = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
    b = tl.load(beta + out, mask=there, other=0.0).to(tl.float32)
    k += row * k_row + (head // SHARE) * K
    v += row * v_row + head * V
    dtype = k.dtype.element_ty

    products = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=there[:, None] & (c < K)[None, :], other=0.0)
        products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
    A = products * b[:, None] * pair_decays(g, ids, row, chunk, T, C, True, False, DOCUMENTS)
    solution = _invert(A, C, SOLVE_PRECISION)
    tl.store(inverse + out[:, None] * C + o[None, :], solution.to(dtype), mask=there[:, None])
    of_keys = tl.trans((solution * (b * from_start)[None, :]).to(dtype))
    of_values = tl.trans((solution * b[None, :]).to(dtype))
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        mask = (c < K)[:, None] & there[None, :]
        keys = tl.load(k + t[None, :] * k_token + c[:, None], mask=mask, other=0.0)
        found = tl.dot(keys, of_keys, input_precision=PRECISION)
        tl.store(w + out[None, :] * K + c[:, None], found.to(dtype), mask=mask)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        mask = (c < V)[:, None] & there[None, :]
        values = tl.load(v + t[None, :] * v_token + c[:, None], mask=mask, other=0.0)
        found = tl.dot(values, of_values, input_precision=PRECISION)
        tl.store(u + out[None, :] * V + c[:, None], found.to(dtype), mask=mask)


@triton.jit
def chunk_wy_bwd_kernel(
    k, v, log_decay, beta, ids, inverse, dw, du, dk_part, dg_parts, dk, dv, d_log_decay, d_beta,
    T, part, k_row, k_token, v_row, v_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PARTS: tl.constexpr, DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk_part [rows, T, H, K] and dg_parts [PARTS, rows, T, H], `part` apart: what chunk_scores_bwd_kernel found, to which this
    adds -> dk like dk_part, dv [rows, T, H, V], d_log_decay and d_beta [rows, T, H]."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    t = chunk * C + o
    there = t < T
    out = (row * T + t) * H + head
    g, total = load_decays(log_decay, row, head, chunk, T, H, C)
    from_start, _, _ = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
    b = tl.load(beta + out, mask=there, other=0.0).to(tl.float32)
    k += row * k_row + (head // SHARE) * K
    v += row * v_row + head * V
    dtype = k.dtype.element_ty

    # Of [w, u] = inverse @ given: d_given = inverse^T d, and d_A = -inverse^T d_inverse inverse^T below the diagonal.
    turned = tl.load(inverse + out[None, :] * C + o[:, None], mask=there[None, :], other=0.0)  # inverse^T
    d_inverse = tl.zeros((C, C), dtype=tl.float32)
    products = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        mask = there[:, None] & (c < K)[None, :]
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=mask, other=0.0)
        d = tl.load(dw + out[:, None] * K + c[None, :], mask=mask, other=0.0)
        given = (keys * (b * from_start)[:, None]).to(dtype)
        d_inverse = tl.dot(d, tl.trans(given), d_inverse, input_precision=PRECISION)
        products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
    d_b = tl.zeros((C,), dtype=tl.float32)
    for first in range(0, V, BV):
        c = first + tl.arange(0, BV)
        mask = there[:, None] & (c < V)[None, :]
        values = tl.load(v + t[:, None] * v_token + c[None, :], mask=mask, other=0.0)
        d = tl.load(du + out[:, None] * V + c[None, :], mask=mask, other=0.0)
        d_inverse = tl.dot(d, tl.trans((values * b[:, None]).to(dtype)), d_inverse, input_precision=PRECISION)
        d_given = tl.dot(turned, d, input_precision=PRECISION)
        tl.store(dv + out[:, None] * V + c[None, :], (d_given * b[:, None]).to(dtype), mask=mask)
        d_b += tl.sum(values.to(tl.float32) * d_given, 1)
    half = tl.dot(turned, d_inverse.to(dtype), input_precision=PRECISION)
    straight = tl.load(inverse + out[:, None] * C + o[None, :], mask=there[:, None], other=0.0)
    d_A = -tl.dot(straight, tl.trans(half.to(dtype)), input_precision=PRECISION)  # transposed: j down, i across
    d_A *= pair_decays(g, ids, row, chunk, T, C, True, True, DOCUMENTS)
    d_pairs = d_A * products
    d_b += tl.sum(d_pairs, 0)
    d_pairs *= b[None, :]
    d_g = tl.sum(d_pairs, 0) - tl.sum(d_pairs, 1)
    d_products = d_A * b[None, :]
    d_products = (d_products + tl.trans(d_products)).to(dtype)  # k_i . k_j is k_j . k_i
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        mask = there[:, None] & (c < K)[None, :]
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=mask, other=0.0)
        d = tl.load(dw + out[:, None] * K + c[None, :], mask=mask, other=0.0)
        d_given = tl.dot(turned, d, input_precision=PRECISION) * from_start[:, None]
        along = tl.sum(keys.to(tl.float32) * d_given, 1)
        d_b += along
        d_g += along * b
        found = tl.load(dk_part + out[:, None] * K + c[None, :], mask=mask, other=0.0).to(tl.float32)
        found += d_given * b[:, None] + tl.trans(tl.dot(tl.trans(keys), d_products, input_precision=PRECISION))
        tl.store(dk + out[:, None] * K + c[None, :], found.to(dtype), mask=mask)
    for i in range(PARTS):
        d_g += tl.load(dg_parts + i * part + out, mask=there, other=0.0)
    tl.store(d_log_decay + out, tl.cumsum(d_g, 0, reverse=True), mask=there)
    tl.store(d_beta + out, d_b, mask=there)
