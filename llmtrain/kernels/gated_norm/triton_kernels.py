"""The gated RMSNorm in Triton, forward and backward, and the launches of both.

A row is one token's group of channels (row_kernels.py). It stays in registers, or (`reload`) is read once more from the L1
cache after its sum is known. r: the reciprocal root mean square, kept for the backward.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.gated_norm.triton_launch import Tile
from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.row_kernels import load_part, load_parts, load_vector
from llmtrain.kernels.sigmoid import sigmoid


def forward(
    x: Tensor, z: Tensor, weight: Tensor, n_groups: int, eps: float, norm_first: bool, tile: Tile
) -> tuple[Tensor, Tensor]:
    """y, contiguous, and r, [tokens, n_groups] in fp32. x, z: [tokens, dim], channels contiguous."""
    tokens, dim = x.shape
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    r = torch.empty((tokens, n_groups), dtype=torch.float32, device=x.device)
    size = dim // n_groups
    _forward[cdiv(tokens, tile.block_rows * tile.max_tiles), n_groups](
        *(x, z, weight, y, r, tokens, tile.max_tiles, size, x.stride(0), z.stride(0), eps),
        **_constants(size, norm_first, tile),
    )
    return y, r


def backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, r: Tensor, norm_first: bool, tile: Tile,
    dz: Tensor | None = None, dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x and z (written into dx and dz, if given), and partial sums of that of weight, [programs, dim] in fp32.

    dy, x, z, dz, dx: [tokens, dim], channels contiguous.
    """
    (tokens, dim), n_groups = x.shape, r.shape[1]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device) if dz is None else dz
    assert dx.stride(1) == dz.stride(1) == 1
    size, programs = dim // n_groups, cdiv(tokens, tile.block_rows * tile.max_tiles)
    partials = torch.empty((programs, dim), dtype=torch.float32, device=x.device)
    _backward[programs, n_groups](
        *(dy, x, z, weight, r, dx, dz, partials, tokens, tile.max_tiles, size),
        *(t.stride(0) for t in (dy, x, z, dx, dz)),
        **_constants(size, norm_first, tile),
        RELOAD=tile.reload,
    )
    return dx, dz, partials


def parameter_gradient(partials: Tensor, weight: Tensor) -> Tensor:
    """Gradient of the weight, from the partial sums, [any number, dim]."""
    d_weight = torch.empty(weight.shape, dtype=weight.dtype, device=weight.device)
    reduce_partials(partials, d_weight)
    return d_weight


def _constants(size: int, norm_first: bool, tile: Tile) -> dict[str, Any]:
    return {
        "NORM_FIRST": norm_first,
        "PARTS": cdiv(size, tile.block_columns),
        "BLOCK_COLUMNS": tile.block_columns,
        "BLOCK_ROWS": tile.block_rows,
        "NUM_STAGES": tile.num_stages,
        "PREFETCH": tile.prefetch,
        "num_warps": tile.num_warps,
    }


@triton.jit
def _gated(x, z):
    """x, silu(z) and silu'(z), in fp32."""
    gate = z.to(tl.float32)
    sig = sigmoid(gate)
    silu = gate * sig
    return x.to(tl.float32), silu, sig + (silu - silu * sig)


@jit
def _forward(
    x, z, weight, y, r, tokens, run, size, x_row, z_row, eps, NORM_FIRST: tl.constexpr, PARTS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr, NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, group)."""
    group, n_groups = tl.program_id(1), tl.num_programs(1)
    x += group * size
    z += group * size
    y += group * size
    weights = load_vector(weight + group * size, size, PARTS, BLOCK_COLUMNS)
    row = tl.program_id(0) * (run * BLOCK_ROWS) + tl.arange(0, BLOCK_ROWS)
    if PREFETCH:
        next_x = load_parts(x, row, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
        next_z = load_parts(z, row, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
    for i in tl.range(0, run, num_stages=NUM_STAGES):
        if PREFETCH:
            xs, zs = next_x, next_z
            later = tl.where(i + 1 < run, row + BLOCK_ROWS, tokens)
            next_x = load_parts(x, later, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
            next_z = load_parts(z, later, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
        else:
            xs = load_parts(x, row, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
            zs = load_parts(z, row, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
        squares = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        values, gates = (), ()
        for p in tl.static_range(PARTS):
            gate = zs[p].to(tl.float32)
            gate *= sigmoid(gate)
            value = xs[p].to(tl.float32)
            if not NORM_FIRST:
                value *= gate
            squares += value * value
            values, gates = values + (value,), gates + (gate,)
        scale = tl.rsqrt(tl.sum(squares, 1) / size + eps)
        tl.store(r + row * n_groups + group, scale, mask=row < tokens)
        for p in tl.static_range(PARTS):
            found = values[p] * scale[:, None] * weights[p]
            if NORM_FIRST:
                found *= gates[p]
            column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
            to = row.to(tl.int64)[:, None] * (size * n_groups) + column
            tl.store(y + to, found.to(y.dtype.element_ty), mask=(row < tokens)[:, None] & (column < size))
        row += BLOCK_ROWS


@jit
def _backward(
    dy, x, z, weight, r, dx, dz, partials, tokens, run, size, dy_row, x_row, z_row, dx_row, dz_row,
    NORM_FIRST: tl.constexpr, PARTS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    NUM_STAGES: tl.constexpr, PREFETCH: tl.constexpr, RELOAD: tl.constexpr,
):  # fmt: skip
    """Program (block of tokens, group).

    With u what is normed (x silu(z), or x) and d the gradient of u, were r constant: du = d - u r^2 mean(d u).
    """
    block, group, n_groups = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    dim = size * n_groups
    dy += group * size
    x += group * size
    z += group * size
    dx += group * size
    dz += group * size
    weights = load_vector(weight + group * size, size, PARTS, BLOCK_COLUMNS)
    sums = (tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32),) * PARTS
    row = block * (run * BLOCK_ROWS) + tl.arange(0, BLOCK_ROWS)
    if PREFETCH:
        next_x = load_parts(x, row, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
        next_z = load_parts(z, row, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
        next_dy = load_parts(dy, row, dy_row, tokens, size, PARTS, BLOCK_COLUMNS)
    for i in tl.range(0, run, num_stages=NUM_STAGES):
        if PREFETCH:
            xs, zs, dys = next_x, next_z, next_dy
            later = tl.where(i + 1 < run, row + BLOCK_ROWS, tokens)
            next_x = load_parts(x, later, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
            next_z = load_parts(z, later, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
            next_dy = load_parts(dy, later, dy_row, tokens, size, PARTS, BLOCK_COLUMNS)
        else:
            xs = load_parts(x, row, x_row, tokens, size, PARTS, BLOCK_COLUMNS)
            zs = load_parts(z, row, z_row, tokens, size, PARTS, BLOCK_COLUMNS)
            dys = load_parts(dy, row, dy_row, tokens, size, PARTS, BLOCK_COLUMNS)
        scale = tl.load(r + row.to(tl.int64) * n_groups + group, mask=row < tokens, other=0.0)[:, None]
        products = tl.zeros((BLOCK_ROWS, BLOCK_COLUMNS), tl.float32)
        added, ds = (), ()
        for p in tl.static_range(PARTS):
            value, silu, _ = _gated(xs[p], zs[p])
            upstream = dys[p].to(tl.float32) * scale
            d = upstream * weights[p]
            # d u: the gate is in u, or in d.
            products += d * (value * silu)
            added, ds = added + (sums[p] + upstream * (value * silu),), ds + (d,)
        sums = added
        mean = scale * scale * (tl.sum(products, 1) / size)[:, None]

        for p in tl.static_range(PARTS):
            if RELOAD:
                again_x = load_part(x, row, x_row, tokens, size, p, BLOCK_COLUMNS, True)
                again_z = load_part(z, row, z_row, tokens, size, p, BLOCK_COLUMNS, True)
                value, silu, slope = _gated(again_x, again_z)
            else:
                value, silu, slope = _gated(xs[p], zs[p])
            if NORM_FIRST:
                found = ds[p] * silu - value * mean
                d_gate = ds[p] * (value * slope)
            else:
                du = ds[p] - value * silu * mean
                found = du * silu
                d_gate = du * (value * slope)
            column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)[None, :]
            at, inside = row.to(tl.int64)[:, None], (row < tokens)[:, None] & (column < size)
            tl.store(dx + at * dx_row + column, found.to(dx.dtype.element_ty), mask=inside)
            tl.store(dz + at * dz_row + column, d_gate.to(dz.dtype.element_ty), mask=inside)
        row += BLOCK_ROWS

    partials += block.to(tl.int64) * dim + group * size
    for p in tl.static_range(PARTS):
        column = p * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        tl.store(partials + column, tl.sum(sums[p], 0), mask=column < size)
