"""Products of groups of rows in Triton: rows of an expert, gathered from tokens and scattered to them, with the activation inside.

A row is one meeting of a token with an expert, sorted by expert; `slots` [N] is the number of each among T * top_k, whose quotient
by top_k is the token. `ends` [n_experts] is one behind each expert's last row. The host knows neither: a grid has as many programs
as tiles there can be, and each finds its expert by itself.
"""

from __future__ import annotations

import triton
import triton.language as tl

from llmtrain.kernels.launch import jit
from llmtrain.kernels.sigmoid import sigmoid


@triton.jit
def _tile(ends, pid, E: tl.constexpr, E_POW2: tl.constexpr, BLOCK_M: tl.constexpr):
    """Expert of a tile of rows, the tile's first row and one behind the expert's last; the latter is not above the first where
    there is no such tile."""
    i = tl.arange(0, E_POW2)
    end = tl.load(ends + i, mask=i < E, other=0)
    begin = tl.load(ends + i - 1, mask=(i > 0) & (i < E), other=0)
    count = tl.where(i < E, end - begin, 0)
    last = tl.cumsum((count + BLOCK_M - 1) // BLOCK_M, 0)
    expert = tl.sum((last <= pid).to(tl.int32))
    before = tl.max(tl.where(i < expert, last, 0))
    first = tl.sum(tl.where(i == expert, begin, 0)) + (pid - before) * BLOCK_M
    return expert, first, tl.sum(tl.where(i == expert, end, 0))


@triton.jit
def _swizzled(pid, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Tile (m, n) of a program: GROUP tiles of rows share their columns of a weight in the cache."""
    width = GROUP * tiles_n
    first = pid // width * GROUP
    rows = min(tiles_m - first, GROUP)
    return first + pid % width % rows, pid % width // rows


@triton.jit
def _activated(gate, ACTIVATION: tl.constexpr):
    """An activation and its slope."""
    if ACTIVATION == "swiglu":
        s = sigmoid(gate)
        act = gate * s
        slope = s + act * (1.0 - s)
    elif ACTIVATION == "relu2":
        positive = tl.maximum(gate, 0.0)
        act = positive * positive
        slope = 2.0 * positive
    elif (ACTIVATION == "geglu_tanh") | (ACTIVATION == "gelu_tanh"):
        s = sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
        act = gate * s
        slope = s + act * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
    else:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))
        act = gate * cdf
        slope = cdf + gate * 0.3989422804014327 * tl.exp2(gate * gate * -0.7213475204444817)
    return act, slope


@triton.jit
def _gemm(
    a,
    w,
    a_rows,
    inside,
    columns,
    K,
    N,
    stride_n,
    stride_k,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """[BLOCK_M, BLOCK_N] in fp32: rows of a [., K] times columns of w. EVEN_K: K is of whole blocks."""
    k = tl.arange(0, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    left = a + a_rows[:, None] * K + k[None, :]
    right = w + columns[None, :].to(tl.int64) * stride_n + k[:, None] * stride_k
    there = (columns < N)[None, :]
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(left, mask=inside[:, None], other=0.0)
            y = tl.load(right, mask=there, other=0.0)
        else:
            within = k < K - start
            x = tl.load(left, mask=inside[:, None] & within[None, :], other=0.0)
            y = tl.load(right, mask=within[:, None] & there, other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
        left += BLOCK_K
        right += BLOCK_K * stride_k
    return total


@triton.jit
def _gemm_pair(
    a,
    w,
    a_rows,
    inside,
    columns,
    K,
    N,
    EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`_gemm` for columns of both halves of w [2 N, K], with one reading of a."""
    k = tl.arange(0, BLOCK_K)
    one = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    other = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    left = a + a_rows[:, None] * K + k[None, :]
    upper = w + columns[None, :].to(tl.int64) * K + k[:, None]
    lower = upper + N.to(tl.int64) * K
    there = (columns < N)[None, :]
    for start in range(0, K, BLOCK_K):
        if EVEN_K:
            x = tl.load(left, mask=inside[:, None], other=0.0)
            y = tl.load(upper, mask=there, other=0.0)
            z = tl.load(lower, mask=there, other=0.0)
        else:
            within = k < K - start
            x = tl.load(left, mask=inside[:, None] & within[None, :], other=0.0)
            y = tl.load(upper, mask=within[:, None] & there, other=0.0)
            z = tl.load(lower, mask=within[:, None] & there, other=0.0)
        one = tl.dot(x, y, one, input_precision="ieee")
        other = tl.dot(x, z, other, input_precision="ieee")
        left += BLOCK_K
        upper += BLOCK_K
        lower += BLOCK_K
    return one, other


@jit
def product(
    a, w, slots, ends, out, K, N, tiles_m, tiles_n, stride_e, stride_n, stride_k,
    E: tl.constexpr, E_POW2: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [slots, N] = rows of a [N, K] times their expert's weight, each row at its slot."""
    pid_m, pid_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = _tile(ends, pid_m, E, E_POW2, BLOCK_M)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        found = _gemm(
            a, w + expert.to(tl.int64) * stride_e, rows.to(tl.int64), inside, columns, K, N, stride_n, stride_k,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        at = tl.load(slots + rows, mask=inside, other=0).to(tl.int64)
        to = out + at[:, None] * N + columns[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@jit
def first_product(
    x, w, slots, ends, h, act, K, F, tiles_m, tiles_n, stride_e, top_k,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    E: tl.constexpr, E_POW2: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """h [N, F or 2 F] = the tokens of the rows times w_in, and its activation act [N, F]."""
    pid_m, pid_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = _tile(ends, pid_m, E, E_POW2, BLOCK_M)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        tokens = (tl.load(slots + rows, mask=inside, other=0) // top_k).to(tl.int64)
        weight = w + expert.to(tl.int64) * stride_e
        mask = inside[:, None] & (columns < F)[None, :]
        to = h + rows.to(tl.int64)[:, None] * (2 * F if GATED else F) + columns[None, :]
        if GATED:
            gate, up = _gemm_pair(x, weight, tokens, inside, columns, K, F, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
            up = up.to(h.dtype.element_ty)
            tl.store(to + F, up, mask=mask)
        else:
            gate = _gemm(x, weight, tokens, inside, columns, K, F, K, 1, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K)
        gate = gate.to(h.dtype.element_ty)
        tl.store(to, gate, mask=mask)
        found, _ = _activated(gate.to(tl.float32), ACTIVATION)
        if GATED:
            found *= up.to(tl.float32)
        tl.store(act + rows.to(tl.int64)[:, None] * F + columns[None, :], found.to(act.dtype.element_ty), mask=mask)


@jit
def first_backward(
    dy, w, slots, ends, weights, h, d_h, act, partials, K, F, n_rows, tiles_m, tiles_n, stride_e, top_k,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    E: tl.constexpr, E_POW2: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The gradient of h from dy [T, K]; act = the activation times the row's weight, again; partials [tiles_n, N], whose sum is the
    gradient of the weights."""
    pid_m, pid_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = _tile(ends, pid_m, E, E_POW2, BLOCK_M)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        at = tl.load(slots + rows, mask=inside, other=0)
        factor = tl.load(weights + at, mask=inside, other=0.0).to(tl.float32)
        d = _gemm(
            dy, w + expert.to(tl.int64) * stride_e, (at // top_k).to(tl.int64), inside, columns, K, F, 1, F,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        mask = inside[:, None] & (columns < F)[None, :]
        width = 2 * F if GATED else F
        place = rows.to(tl.int64)[:, None] * width + columns[None, :]
        gate = tl.load(h + place, mask=mask, other=0.0).to(tl.float32)
        found, slope = _activated(gate, ACTIVATION)
        d_weighted = d * factor[:, None]
        if GATED:
            up = tl.load(h + place + F, mask=mask, other=0.0).to(tl.float32)
            tl.store(d_h + place + F, (d_weighted * found).to(d_h.dtype.element_ty), mask=mask)
            slope *= up
            found *= up
        tl.store(d_h + place, (d_weighted * slope).to(d_h.dtype.element_ty), mask=mask)
        sums = tl.sum(tl.where(mask, d * found, 0.0), 1)
        tl.store(partials + pid_n.to(tl.int64) * n_rows + at, sums, mask=inside)
        to = act + rows.to(tl.int64)[:, None] * F + columns[None, :]
        tl.store(to, (found * factor[:, None]).to(act.dtype.element_ty), mask=mask)


@jit
def weight_gradient(
    left, right, slots, ends, out, M, N, tiles_n, top_k,
    GATHER_LEFT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [n_experts, M, N] = left^T right over the rows of each expert. The other than `left` or `right` that is of tokens is read
    by the rows' tokens. Program (tile of the matrix, expert)."""
    expert = tl.program_id(1)
    m = tl.program_id(0) // tiles_n * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) % tiles_n * BLOCK_N + tl.arange(0, BLOCK_N)
    begin = tl.load(ends + expert - 1, mask=expert > 0, other=0)
    end = tl.load(ends + expert)
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, BLOCK_K):
        rows = start + tl.arange(0, BLOCK_K)
        inside = rows < end
        tokens = (tl.load(slots + rows, mask=inside, other=0) // top_k).to(tl.int64)
        rows = rows.to(tl.int64)
        of_left = tokens if GATHER_LEFT else rows
        of_right = rows if GATHER_LEFT else tokens
        x = tl.load(left + of_left[None, :] * M + m[:, None], mask=(m < M)[:, None] & inside[None, :], other=0.0)
        y = tl.load(right + of_right[:, None] * N + n[None, :], mask=inside[:, None] & (n < N)[None, :], other=0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    to = out + (expert.to(tl.int64) * M + m[:, None]) * N + n[None, :]
    tl.store(to, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


@jit
def sum_slots(y, weights, out, D, TOP_K: tl.constexpr, WEIGHTED: tl.constexpr, BLOCK: tl.constexpr):
    """out [T, D] = the sum over the slots y [T * TOP_K, D] of each token, times their weights. Program (token, tile)."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < D
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for i in tl.static_range(TOP_K):
        slot = token * TOP_K + i
        row = tl.load(y + slot * D + columns, mask=inside, other=0.0).to(tl.float32)
        if WEIGHTED:
            row *= tl.load(weights + slot).to(tl.float32)
        total += row
    tl.store(out + token * D + columns, total.to(out.dtype.element_ty), mask=inside)
