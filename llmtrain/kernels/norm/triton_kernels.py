"""LayerNorm and RMSNorm of x + delta in Triton, forward and backward, and the launches of both.

A row is one token, in registers as a whole (row_kernels.py). u: the normed row before weight and bias; r: the reciprocal of its
root mean square or, of LayerNorm, standard deviation. Statistics, [1 or 2, tokens] in fp32: r and, of LayerNorm, the means.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.row_kernels import load_part, load_parts, load_vector
from llmtrain.kernels.row_tiles import Tile


def forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, centred: bool, eps: float, tile: Tile
) -> tuple[Tensor | None, Tensor, Tensor]:
    """x + delta (None without delta), its norm, and the statistics. x, delta: [tokens, dim], contiguous. centred: LayerNorm."""
    tokens, dim = x.shape
    assert not tile.prefetch, "the forward does not prefetch into registers"
    total = None if delta is None else torch.empty_like(x)
    y, statistics = torch.empty_like(x), torch.empty((1 + centred, tokens), dtype=torch.float32, device=x.device)
    _forward[(cdiv(tokens, tile.block_rows * tile.max_tiles),)](
        *(x, delta, weight, bias, total, y, statistics, tokens, tile.max_tiles, dim, eps),
        **_constants(dim, centred, tile),
    )
    return total, y, statistics


def backward(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, statistics: Tensor, biased: bool, tile: Tile,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of the norm's input (d_total: the part of it that bypasses the norm), and partial sums of those of the weight
    and, if biased, the bias: [programs, dim or 2 dim] in fp32. dy, d_total, total: [tokens, dim], contiguous.
    """
    tokens, dim = total.shape
    programs = cdiv(tokens, tile.block_rows * tile.max_tiles)
    dx = torch.empty_like(total)
    partials = torch.empty((programs, dim * (1 + biased)), dtype=torch.float32, device=dy.device)
    _backward[(programs,)](
        *(dy, d_total, total, weight, statistics, dx, partials, tokens, tile.max_tiles, dim),
        **_constants(dim, len(statistics) == 2, tile),
        BIASED=biased,
        PREFETCH=tile.prefetch,
    )
    return dx, partials


def parameter_gradients(partials: Tensor, weight: Tensor, biased: bool) -> tuple[Tensor, Tensor | None]:
    """Gradients of the weight and the bias, like the weight, from the partial sums."""
    d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    d_bias = torch.empty_like(d_weight) if biased else None
    reduce_partials(partials, d_weight, d_bias)
    return d_weight, d_bias


def _constants(dim: int, centred: bool, tile: Tile) -> dict[str, Any]:
    return {
        "CENTRED": centred,
        "PARTS": cdiv(dim, tile.block_columns),
        "BLOCK_COLUMNS": tile.block_columns,
        "BLOCK_ROWS": tile.block_rows,
        "NUM_STAGES": tile.num_stages,
        "num_warps": tile.num_warps,
    }


@jit
def _forward(
    x, delta, weight, bias, total, y, statistics, tokens, run, dim, eps, CENTRED: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens). The norm is that of the sum before it is rounded."""
    weights = load_vector(weight, dim, PARTS, BLOCK_COLUMNS)
    if bias is not None:
        biases = load_vector(bias, dim, PARTS, BLOCK_COLUMNS)
    row = tl.program_id(0) * (run * BLOCK_ROWS) + tl.arange(0, BLOCK_ROWS)
    for _ in tl.range(0, run, num_stages=NUM_STAGES):
        sums = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        values = ()
        for p in tl.static_range(PARTS):
            value = load_part(x, row, dim, tokens, dim, p, BLOCK_COLUMNS, False).to(tl.float32)
            if delta is not None:
                value += load_part(delta, row, dim, tokens, dim, p, BLOCK_COLUMNS, False).to(tl.float32)
            sums += value if CENTRED else value * value
            values = values + (value,)
        mean = tl.sum(sums, 1) / dim
        if CENTRED:
            tl.store(statistics + tokens + row, mean, mask=row < tokens)
            squares = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
            for p in tl.static_range(PARTS):
                column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
                apart = tl.where(column < dim, values[p] - mean[:, None], 0.0)
                squares += apart * apart
            r = tl.rsqrt(tl.sum(squares, 1) / dim + eps)
        else:
            r = tl.rsqrt(mean + eps)
        tl.store(statistics + row, r, mask=row < tokens)
        for p in tl.static_range(PARTS):
            column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
            at, inside = row.to(tl.int64)[:, None] * dim + column, (row < tokens)[:, None] & (column < dim)
            if delta is not None:
                tl.store(total + at, values[p].to(total.dtype.element_ty), mask=inside)
            u = (values[p] - mean[:, None] if CENTRED else values[p]) * r[:, None]
            found = u * weights[p]
            if bias is not None:
                found += biases[p]
            tl.store(y + at, found.to(y.dtype.element_ty), mask=inside)
        row += BLOCK_ROWS


@triton.jit
def _normed(x, mean, r, CENTRED: tl.constexpr):
    value = x.to(tl.float32)
    if CENTRED:
        value -= mean
    return value * r


@jit
def _backward(
    dy, d_total, total, weight, statistics, dx, partials, tokens, run, dim, CENTRED: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_STAGES: tl.constexpr,
    BIASED: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens). With d = dy weight: dx = r (d - u mean(d u)), and of LayerNorm less r mean(d)."""
    weights = load_vector(weight, dim, PARTS, BLOCK_COLUMNS)
    weight_sums = (tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32),) * PARTS
    bias_sums = (tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32),) * PARTS
    block = tl.program_id(0)
    row = block * (run * BLOCK_ROWS) + tl.arange(0, BLOCK_ROWS)
    if PREFETCH:
        next_x = load_parts(total, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
        next_dy = load_parts(dy, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
        if d_total is not None:
            next_residual = load_parts(d_total, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
    for i in tl.range(0, run, num_stages=NUM_STAGES):
        if PREFETCH:
            xs, dys = next_x, next_dy
            later = tl.where(i + 1 < run, row + BLOCK_ROWS, tokens)
            next_x = load_parts(total, later, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
            next_dy = load_parts(dy, later, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
            if d_total is not None:
                residual = next_residual
                next_residual = load_parts(d_total, later, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
        else:
            xs = load_parts(total, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
            dys = load_parts(dy, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
            if d_total is not None:
                residual = load_parts(d_total, row, dim, tokens, dim, PARTS, BLOCK_COLUMNS)
        inside = row < tokens
        r = tl.load(statistics + row, mask=inside, other=0.0)[:, None]
        mean = r
        if CENTRED:
            mean = tl.load(statistics + tokens + row, mask=inside, other=0.0)[:, None]
        products, sums = (
            tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32),
            tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32),
        )
        to_weights, to_biases = (), ()
        for p in tl.static_range(PARTS):
            u, upstream = _normed(xs[p], mean, r, CENTRED), dys[p].to(tl.float32)
            products += upstream * weights[p] * u
            if CENTRED:
                sums += upstream * weights[p]
            to_weights = to_weights + (weight_sums[p] + upstream * u,)
            to_biases = to_biases + (bias_sums[p] + upstream,)
        weight_sums = to_weights
        if BIASED:
            bias_sums = to_biases
        along, level = (tl.sum(products, 1) / dim)[:, None], (tl.sum(sums, 1) / dim)[:, None]
        for p in tl.static_range(PARTS):
            d = dys[p].to(tl.float32) * weights[p]
            if CENTRED:
                d -= level
            found = r * (d - _normed(xs[p], mean, r, CENTRED) * along)
            if d_total is not None:
                found += residual[p].to(tl.float32)
            column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
            at = row.to(tl.int64)[:, None] * dim + column
            tl.store(dx + at, found.to(dx.dtype.element_ty), mask=inside[:, None] & (column < dim))
        row += BLOCK_ROWS

    partials += block.to(tl.int64) * (2 * dim if BIASED else dim)
    for p in tl.static_range(PARTS):
        column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        tl.store(partials + column, tl.sum(weight_sums[p], 0), mask=column < dim)
        if BIASED:
            tl.store(partials + dim + column, tl.sum(bias_sums[p], 0), mask=column < dim)
