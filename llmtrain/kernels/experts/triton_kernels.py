"""Products of groups of rows in Triton: rows of an expert, gathered from tokens and scattered to slots.

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
    a, w, a_rows, inside, columns, K, N, stride_n, stride_k,
    EVEN_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
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


@jit
def product(
    a, w, slots, ends, out, K, N, tiles_m, tiles_n, stride_e, stride_n, stride_k, top_k,
    GATHER: tl.constexpr, SCATTER: tl.constexpr,
    E: tl.constexpr, E_POW2: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [., N] = rows of a [., K] times their expert's weight. GATHER: rows of a are tokens. SCATTER: those of out are slots."""
    pid_m, pid_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = _tile(ends, pid_m, E, E_POW2, BLOCK_M)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        source = rows
        if GATHER:
            source = tl.load(slots + rows, mask=inside, other=0) // top_k
        found = _gemm(
            a, w + expert.to(tl.int64) * stride_e, source.to(tl.int64), inside, columns, K, N, stride_n, stride_k,
            EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
        if SCATTER:
            rows = tl.load(slots + rows, mask=inside, other=0)
        to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])


@jit
def activate(h, act, F, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):
    """act [N, F] = the activation of h [N, F or 2 F]. Program (row, tile)."""
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < F
    gate = h + row * (2 * F if GATED else F) + columns
    found, _ = _activated(tl.load(gate, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
    if GATED:
        found *= tl.load(gate + F, mask=inside, other=0.0).to(tl.float32)
    tl.store(act + row * F + columns, found.to(act.dtype.element_ty), mask=inside)


@jit
def activate_backward(
    d, h, slots, weights, d_h, d_weights, F, ACTIVATION: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr
):
    """d [N, F] is the gradient of the activation before the row's weight; it becomes the activation times that weight. Also the
    gradients of h and, by slots, of the weights. Program: row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    factor = tl.load(weights + slot).to(tl.float32)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for start in range(0, F, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        inside = columns < F
        at = row * (2 * F if GATED else F) + columns
        given = tl.load(d + row * F + columns, mask=inside, other=0.0).to(tl.float32)
        found, slope = _activated(tl.load(h + at, mask=inside, other=0.0).to(tl.float32), ACTIVATION)
        if GATED:
            up = tl.load(h + at + F, mask=inside, other=0.0).to(tl.float32)
            tl.store(d_h + at + F, (given * factor * found).to(d_h.dtype.element_ty), mask=inside)
            slope *= up
            found *= up
        tl.store(d_h + at, (given * factor * slope).to(d_h.dtype.element_ty), mask=inside)
        total += tl.where(inside, given * found, 0.0)
        tl.store(d + row * F + columns, (found * factor).to(d.dtype.element_ty), mask=inside)
    tl.store(d_weights + slot, tl.sum(total, 0).to(d_weights.dtype.element_ty))


@triton.jit
def _rows_product(
    total, left, right, slots, start, end, m, n, M, N, top_k,
    GATHER_LEFT: tl.constexpr, WHOLE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """total + left^T right over the BLOCK_K rows from start on, or with WHOLE False over those before end."""
    rows = start + tl.arange(0, BLOCK_K)
    of_m, of_n = m < M, n < N
    if WHOLE:
        tokens = tl.load(slots + rows) // top_k
        left_mask, right_mask = of_m[:, None], of_n[None, :]
    else:
        inside = rows < end
        tokens = tl.load(slots + rows, mask=inside, other=0) // top_k
        left_mask, right_mask = of_m[:, None] & inside[None, :], inside[:, None] & of_n[None, :]
    of_left = (tokens if GATHER_LEFT else rows).to(tl.int64)
    of_right = (rows if GATHER_LEFT else tokens).to(tl.int64)
    x = tl.load(left + of_left[None, :] * M + m[:, None], mask=left_mask, other=0.0)
    y = tl.load(right + of_right[:, None] * N + n[None, :], mask=right_mask, other=0.0)
    return tl.dot(x, y, total, input_precision="ieee")


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
    rest = begin + (end - begin) // BLOCK_K * BLOCK_K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, rest, BLOCK_K):
        total = _rows_product(total, left, right, slots, start, end, m, n, M, N, top_k, GATHER_LEFT, True, BLOCK_K)
    if rest < end:
        total = _rows_product(total, left, right, slots, rest, end, m, n, M, N, top_k, GATHER_LEFT, False, BLOCK_K)
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
