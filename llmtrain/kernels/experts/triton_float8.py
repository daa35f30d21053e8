"""Experts in float8 by our Triton kernels: casts, and products with scales. What is no product is as in triton.py, as are gradients
of weights.

Matrix units of Hopper take float8 with the summed dimension contiguous alone, so that the weights of a gradient's product are cast
in the other order.
"""

from __future__ import annotations

from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.experts.float8 import Float8Formats, scales_of
from llmtrain.kernels.experts.reference import Rows
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.experts.triton import (
    GROUP,
    Tiles,
    activate,
    activation_gradients,
    on_device,
    sum_slots,
    weight_gradients,
)
from llmtrain.kernels.experts.triton_kernels import _gemm, _swizzled, _tile
from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.operators import operator, register_autograd
from llmtrain.kernels.platform import Platform

_CAST = 64
_NVIDIA, _AMD, INTERPRETED = Tiles(128, 128, 128, 8, 3, 1), Tiles(128, 128, 64, 8, 2, 1), Tiles(32, 32, 32, 4, 2, 1)


def tiles_for(platform: Platform) -> Tiles:
    return {"amd": _AMD, "cpu": INTERPRETED}.get(platform.vendor, _NVIDIA)


class TritonFloat8Experts:
    """The signature of ReferenceExperts, without biases."""

    def __init__(self, spec: ExpertsSpec, formats: Float8Formats):
        self.spec, self.formats = spec, formats

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, *biases: Tensor | None
    ) -> Tensor:
        assert not any(bias is not None for bias in biases)
        rows, of = Rows.of(chosen, self.spec.n_experts), self.formats
        kinds = (self.spec.activation, of.rowwise, of.forward, of.gradient)
        out, _ = float8_experts_forward(x, rows.order.int(), rows.ends, weights, w_in, w_out, *kinds)
        return out


def cast(
    x: Tensor, dims: tuple[int, ...], dtype: torch.dtype, rowwise: bool, transposed: bool = False
) -> tuple[Tensor, Tensor]:
    """x [n, R, C] in float8, or with `transposed` its matrices transposed, and `scales_of` it."""
    n, rows, columns = x.shape
    scale = scales_of(x, dims, dtype, rowwise)
    out = x.new_empty((n, columns, rows) if transposed else x.shape, dtype=dtype)
    wide = scale.expand(x.shape)
    tiles = cdiv(rows, _CAST), cdiv(columns, _CAST)
    cast_matrices[tiles[0] * tiles[1], n](
        x, wide, out, rows, columns, tiles[1], *wide.stride(),
        LARGEST=torch.finfo(dtype).max, TRANSPOSED=transposed, BLOCK=_CAST, num_warps=4,
    )  # fmt: skip
    return out, scale


def _product(
    rows: Tensor, weight: Tensor, slots: Tensor, ends: Tensor, top_k: int, dtypes: tuple[torch.dtype, torch.dtype],
    rowwise: bool, *, gather: bool = False, scatter: bool = False, transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Product of triton._product, of both cast to `dtypes` before."""
    n, tiles = weight.shape[0], on_device(rows.device, tiles_for)
    summed, columns = rows.shape[1], weight.shape[2 if transposed else 1]
    left, left_scale = cast(rows[None], (2,) if rowwise else (1, 2), dtypes[0], rowwise)
    over = (1 if transposed else 2,) if rowwise else (1, 2)
    right, right_scale = cast(weight, over, dtypes[1], rowwise, transposed)
    out = rows.new_empty(len(slots), columns)
    tiles_m, tiles_n = len(slots) // tiles.block_m + n, cdiv(columns, tiles.block_n)
    product_float8[(tiles_m * tiles_n,)](
        left, right, left_scale, right_scale, slots, ends, out, summed, columns, tiles_m, tiles_n, top_k,
        ROWWISE=rowwise, GATHER=gather, SCATTER=scatter, E=n, E_POW2=next_power_of_2(n), GROUP=GROUP,
        EVEN_K=summed % tiles.block_k == 0, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def launch_forward(
    x: Tensor, slots: Tensor, ends: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str, rowwise: bool,
    forward: torch.dtype, gradient: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [T, d_model], and the first product's [N, d_in]."""
    x, weights, w_in, w_out = (t.contiguous() for t in (x, weights, w_in, w_out))
    if not len(slots):
        return torch.zeros_like(x), x.new_empty(0, w_in.shape[1])
    kinds, top_k = ((forward, forward), rowwise), weights.shape[1]
    h = _product(x, w_in, slots, ends, top_k, *kinds, gather=True)
    act = activate(h, w_out.shape[2], activation)
    return sum_slots(_product(act, w_out, slots, ends, top_k, *kinds, scatter=True), weights, weighted=True), h


def launch_backward(
    dy: Tensor, x: Tensor, slots: Tensor, ends: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, h: Tensor,
    activation: str, rowwise: bool, forward: torch.dtype, gradient: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weights, w_in and w_out."""
    dy, x, weights, w_in, w_out = (t.contiguous() for t in (dy, x, weights, w_in, w_out))
    if not len(slots):
        return tuple(torch.zeros_like(t) for t in (x, weights, w_in, w_out))
    kinds, top_k = ((gradient, forward), rowwise), weights.shape[1]
    d_act = _product(dy, w_out, slots, ends, top_k, *kinds, gather=True, transposed=True)
    d_h, d_weights = activation_gradients(d_act, h, slots, weights, activation)
    d_rows = _product(d_h, w_in, slots, ends, top_k, *kinds, scatter=True, transposed=True)
    d_x = sum_slots(d_rows, weights, weighted=False)
    return d_x, d_weights, *weight_gradients(dy, x, d_act, d_h, slots, ends, top_k)


float8_experts_forward = operator("float8_experts_forward", launch_forward)
float8_experts_backward = operator("float8_experts_backward", launch_backward)


@torch.library.register_fake(float8_experts_forward)
def _(x, slots, ends, weights, w_in, w_out, *kinds):
    return x.new_empty(x.shape), x.new_empty(slots.shape[0], w_in.shape[1])


@torch.library.register_fake(float8_experts_backward)
def _(dy, x, slots, ends, weights, w_in, w_out, h, *kinds):
    return tuple(t.new_empty(t.shape) for t in (x, weights, w_in, w_out))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs[:6], output[1])
    ctx.kinds = inputs[6:]
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, d_h: Tensor | None) -> tuple[Tensor | None, ...]:
    d_x, d_weights, d_w_in, d_w_out = float8_experts_backward(dy, *ctx.saved_tensors, *ctx.kinds)
    return d_x, None, None, d_weights, d_w_in, d_w_out, None, None, None, None


register_autograd(float8_experts_forward, _backward, _setup_context)


@jit
def cast_matrices(
    x, scale, out, rows, columns, tiles_n, stride_e, stride_r, stride_c,
    LARGEST: tl.constexpr, TRANSPOSED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x / scale in float8, of matrices [n, rows, columns]. stride: of scale. Program (tile of a matrix, matrix)."""
    row = (tl.program_id(0) // tiles_n * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    column = (tl.program_id(0) % tiles_n * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    matrix = tl.program_id(1).to(tl.int64)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    at = matrix * rows * columns + row[:, None] * columns + column[None, :]
    by = matrix * stride_e + row[:, None] * stride_r + column[None, :] * stride_c
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) / tl.load(scale + by, mask=inside, other=1.0)
    # A NaN may be clamped here; it has made the scale NaN, and that makes the product NaN.
    value = tl.minimum(tl.maximum(value, -LARGEST), LARGEST).to(out.dtype.element_ty)
    if TRANSPOSED:
        to = matrix * rows * columns + column[:, None] * rows + row[None, :]
        tl.store(out + to, tl.trans(value), mask=tl.trans(inside))
    else:
        tl.store(out + at, value, mask=inside)


@jit
def product_float8(
    a, w, a_scale, w_scale, slots, ends, out, K, N, tiles_m, tiles_n, top_k,
    ROWWISE: tl.constexpr, GATHER: tl.constexpr, SCATTER: tl.constexpr,
    E: tl.constexpr, E_POW2: tl.constexpr, GROUP: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """out [., N] = rows of a [., K] times their expert's weight [N, K], times the scales of both. GATHER: rows of a are tokens.
    SCATTER: those of out are slots."""
    pid_m, pid_n = _swizzled(tl.program_id(0), tiles_m, tiles_n, GROUP)
    expert, first, end = _tile(ends, pid_m, E, E_POW2, BLOCK_M)
    if first < end:
        rows = first + tl.arange(0, BLOCK_M)
        inside = rows < end
        columns = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        of_matrix, source = expert.to(tl.int64) * N, rows
        if GATHER:
            source = tl.load(slots + rows, mask=inside, other=0) // top_k
        found = _gemm(
            a, w + of_matrix * K, source.to(tl.int64), inside, columns, K, N, K, 1, EVEN_K, BLOCK_M, BLOCK_N, BLOCK_K
        )
        if ROWWISE:
            found *= tl.load(a_scale + source, mask=inside, other=0.0)[:, None]
            found *= tl.load(w_scale + of_matrix + columns, mask=columns < N, other=0.0)[None, :]
        else:
            found *= tl.load(a_scale) * tl.load(w_scale + expert)
        if SCATTER:
            rows = tl.load(slots + rows, mask=inside, other=0)
        to = out + rows.to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(to, found.to(out.dtype.element_ty), mask=inside[:, None] & (columns < N)[None, :])
