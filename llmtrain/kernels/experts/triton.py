"""Experts by our Triton kernels: the operators and the backend. No atomics, and nothing that waits for the host.

Kept for the backward pass are the first product's output and the order of the rows; the activation is computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.experts import triton_kernels as kernels
from llmtrain.kernels.experts.reference import Rows
from llmtrain.kernels.experts.spec import GATED, ExpertsSpec
from llmtrain.kernels.launch import cdiv, next_power_of_2
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform, detect, shared_limit

_ROW_BLOCK = 1024
GROUP = 8


@dataclass(frozen=True)
class Tiles:
    """Launch parameters of the products: block_m rows by block_n columns, block_k summed at a time."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    width: int = 2
    """Bytes of a number."""

    @property
    def shared_bytes(self) -> int:
        """Bytes of the tiles that are loaded ahead."""
        return self.width * self.num_stages * self.block_k * (self.block_m + self.block_n)


_SQUARE = Tiles(128, 128, 64, 8, 3)
TILES: dict[str, dict[str, tuple[Tiles, ...]]] = {
    "nvidia": {"product": (Tiles(128, 256, 64, 8, 3), _SQUARE), "weight_gradient": (_SQUARE,)},
    "amd": dict.fromkeys(("product", "weight_gradient"), (Tiles(128, 128, 32, 8, 2),)),
}
"""The fastest first (docs/kernels-log.md)."""
FULL = Tiles(32, 32, 32, 4, 2)
"""Of fp32."""


def tiles_for(kernel: str, platform: Platform) -> Tiles:
    """The fastest tiles for 16 bits that the shared memory of a program holds."""
    limit, choices = shared_limit(platform.arch), TILES.get(platform.vendor, TILES["nvidia"])[kernel]
    return next((one for one in choices if limit is None or one.shared_bytes <= limit), choices[-1])


@functools.cache
def on_device(device: torch.device, choose: Callable[..., Tiles], *kernel: str) -> Tiles:
    """Result of choose(*kernel, platform) for the device's platform."""
    return choose(*kernel, detect(device))


def tiles_of(rows: Tensor, kernel: str) -> Tiles:
    return FULL if rows.dtype == torch.float32 else on_device(rows.device, tiles_for, kernel)


class TritonExperts:
    """The signature of ReferenceExperts, without biases."""

    def __init__(self, spec: ExpertsSpec):
        self.spec = spec

    def __call__(
        self, x: Tensor, chosen: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, *biases: Tensor | None
    ) -> Tensor:
        assert not any(bias is not None for bias in biases)
        rows = Rows.of(chosen, self.spec.n_experts)
        out, _ = call(experts_forward, x, rows.order.int(), rows.ends, weights, w_in, w_out, self.spec.activation)
        return out


def _product(
    rows: Tensor, weight: Tensor, slots: Tensor, ends: Tensor, top_k: int = 1, *, gather: bool = False, scatter: bool = False,
    transposed: bool = False,
) -> Tensor:  # fmt: skip
    """Rows [N, K], or with gather tokens [T, K], times weight [n, out, K], or transposed [n, K, out] -> [N, out], with scatter by
    slots."""
    n, tiles = weight.shape[0], tiles_of(rows, "product")
    summed, columns = rows.shape[1], weight.shape[2 if transposed else 1]
    out = rows.new_empty(len(slots), columns)
    tiles_m, tiles_n = len(slots) // tiles.block_m + n, cdiv(columns, tiles.block_n)
    kernels.product[(tiles_m * tiles_n,)](
        rows, weight, slots, ends, out, summed, columns, tiles_m, tiles_n, summed * columns,
        *((1, columns) if transposed else (summed, 1)), top_k,
        GATHER=gather, SCATTER=scatter, E=n, E_POW2=next_power_of_2(n), GROUP=GROUP, EVEN_K=summed % tiles.block_k == 0,
        BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k, num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


def _block(width: int) -> int:
    return min(_ROW_BLOCK, next_power_of_2(width))


def sum_slots(y: Tensor, weights: Tensor, weighted: bool) -> Tensor:
    """[T * top_k, D] -> [T, D]."""
    tokens, top_k = weights.shape
    out = y.new_empty(tokens, y.shape[1])
    block = _block(y.shape[1])
    kernels.sum_slots[tokens, cdiv(y.shape[1], block)](
        y, weights, out, y.shape[1], TOP_K=top_k, WEIGHTED=weighted, BLOCK=block, num_warps=4
    )
    return out


def activate(h: Tensor, f: int, activation: str) -> Tensor:
    """The activation [N, f] of the first product's output."""
    act, block = h.new_empty(len(h), f), _block(f)
    kernels.activate[len(h), cdiv(f, block)](
        h, act, f, ACTIVATION=activation, GATED=activation in GATED, BLOCK=block, num_warps=4
    )
    return act


def launch_forward(
    x: Tensor, slots: Tensor, ends: Tensor, weights: Tensor, w_in: Tensor, w_out: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The output [T, d_model], and the first product's [N, d_in]."""
    x, weights, w_in, w_out = (t.contiguous() for t in (x, weights, w_in, w_out))
    if not len(slots):
        return torch.zeros_like(x), x.new_empty(0, w_in.shape[1])
    h = _product(x, w_in, slots, ends, weights.shape[1], gather=True)
    act = activate(h, w_out.shape[2], activation)
    return sum_slots(_product(act, w_out, slots, ends, scatter=True), weights, weighted=True), h


def launch_backward(
    dy: Tensor,
    x: Tensor,
    slots: Tensor,
    ends: Tensor,
    weights: Tensor,
    w_in: Tensor,
    w_out: Tensor,
    h: Tensor,
    activation: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of x, weights, w_in and w_out."""
    dy, x, weights, w_in, w_out = (t.contiguous() for t in (dy, x, weights, w_in, w_out))
    if not len(slots):
        return tuple(torch.zeros_like(t) for t in (x, weights, w_in, w_out))
    top_k = weights.shape[1]
    d_act = _product(dy, w_out, slots, ends, top_k, gather=True, transposed=True)
    d_h, d_weights = activation_gradients(d_act, h, slots, weights, activation)
    d_x = sum_slots(_product(d_h, w_in, slots, ends, scatter=True, transposed=True), weights, weighted=False)
    return d_x, d_weights, *weight_gradients(dy, x, d_act, d_h, slots, ends, top_k)


def activation_gradients(
    d_act: Tensor, h: Tensor, slots: Tensor, weights: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradients of h and weights; d_act [N, d_ff] becomes the activation times the rows' weights."""
    f, d_h, d_weights = d_act.shape[1], torch.empty_like(h), torch.empty_like(weights)
    kernels.activate_backward[(len(slots),)](
        d_act, h, slots, weights, d_h, d_weights, f,
        ACTIVATION=activation, GATED=activation in GATED, BLOCK=_block(f), num_warps=4,
    )  # fmt: skip
    return d_h, d_weights


def weight_gradients(
    dy: Tensor, x: Tensor, act: Tensor, d_h: Tensor, slots: Tensor, ends: Tensor, top_k: int
) -> tuple[Tensor, Tensor]:
    """The gradients of w_in and w_out. act: times the rows' weights."""
    d_w_in = _weight_gradient(d_h, x, slots, ends, top_k, gather_left=False)
    return d_w_in, _weight_gradient(dy, act, slots, ends, top_k, gather_left=True)


def _weight_gradient(left: Tensor, right: Tensor, slots: Tensor, ends: Tensor, top_k: int, gather_left: bool) -> Tensor:
    """[n_experts, columns of left, columns of right]."""
    tiles, (m, n) = tiles_of(left, "weight_gradient"), (left.shape[1], right.shape[1])
    out, tiles_n = left.new_empty(len(ends), m, n), cdiv(n, tiles.block_n)
    kernels.weight_gradient[cdiv(m, tiles.block_m) * tiles_n, len(ends)](
        left, right, slots, ends, out, m, n, tiles_n, top_k,
        GATHER_LEFT=gather_left, BLOCK_M=tiles.block_m, BLOCK_N=tiles.block_n, BLOCK_K=tiles.block_k,
        num_warps=tiles.num_warps, num_stages=tiles.num_stages,
    )  # fmt: skip
    return out


experts_forward = operator("experts_forward", launch_forward, replayed=True)
experts_backward = operator("experts_backward", launch_backward, replayed=True)


@torch.library.register_fake(experts_forward)
def _(x, slots, ends, weights, w_in, w_out, activation):
    return x.new_empty(x.shape), x.new_empty(slots.shape[0], w_in.shape[1])


@torch.library.register_fake(experts_backward)
def _(dy, x, slots, ends, weights, w_in, w_out, h, activation):
    return tuple(t.new_empty(t.shape) for t in (x, weights, w_in, w_out))


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, ctx.activation = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, dy: Tensor, d_h: Tensor | None) -> tuple[Tensor | None, ...]:
    d_x, d_weights, d_w_in, d_w_out = call(experts_backward, dy, *ctx.saved_tensors, ctx.activation)
    return d_x, None, None, d_weights, d_w_in, d_w_out, None


register_autograd(experts_forward, _backward, _setup_context)


def build(spec: ExpertsSpec, platform: Platform, variant: str) -> TritonExperts:
    return TritonExperts(spec)
