"""LayerNorm and RMSNorm of a residual stream in Triton: the operators and the backend. No atomics.

The sum with a layer's output is part of the norm: it is read once, and its gradient is added to the norm's in the pass that
computes the latter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.norm import triton_kernels as kernels
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import Launch, fitted, narrowed


def default_launch(spec: NormSpec, platform: Platform) -> Launch:
    """Launch parameters from the tuning table, no wider than a row."""
    tiles = tuning.forward_backward("norm", spec.dtype, {"dim": spec.dim}, platform)
    return Launch(*(narrowed(tile, spec.dim) for tile in tiles), platform.num_sms)


def build(spec: NormSpec, platform: Platform, variant: str) -> TritonNorm:
    return TritonNorm(spec, default_launch(spec, platform))


class TritonNorm:
    """The signature of the reference. Computes in fp32, whatever the dtypes; results have x's dtype and are contiguous."""

    def __init__(self, spec: NormSpec, launch: Launch):
        self.spec, self.options = spec, launch.dump()

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta (x itself without delta), and its norm. x, delta: [..., dim]; weight, bias: [dim]."""
        spec = self.spec
        assert x.shape[-1:] == weight.shape == (spec.dim,) and (bias is not None) == spec.bias
        assert delta is None or (delta.shape == x.shape and delta.dtype == x.dtype)
        total, y, _ = call(norm_forward, x, delta, weight, bias, spec.type == "layernorm", spec.eps, self.options)
        return (x if delta is None else total), y


def launch_forward(
    x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None, centred: bool, eps: float, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta (empty without delta), its norm, and the statistics; see kernels.forward."""
    rows, launch = _rows(x), Launch.parse(options)
    tile = fitted(launch.forward, launch.num_sms, len(rows))
    bias = None if bias is None else bias.contiguous()
    residual = None if delta is None else _rows(delta)
    total, y, statistics = kernels.forward(rows, residual, weight.contiguous(), bias, centred, eps, tile)
    return x.new_empty(0) if total is None else total.view(x.shape), y.view(x.shape), statistics


norm_forward = operator("norm_forward", launch_forward, replayed=True)


@torch.library.register_fake(norm_forward)
def _(x, delta, weight, bias, centred, eps, options):
    statistics = x.new_empty((1 + centred, x.numel() // x.shape[-1]), dtype=torch.float32)
    return x.new_empty(0 if delta is None else x.shape), x.new_empty(x.shape), statistics


def launch_backward(
    dy: Tensor, d_total: Tensor | None, total: Tensor, weight: Tensor, statistics: Tensor, biased: bool, options: str
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of the norm's input, of the weight and of the bias (empty, if there is none)."""
    rows, launch = _rows(total), Launch.parse(options)
    tile = fitted(launch.backward, launch.num_sms, len(rows))
    residual = None if d_total is None else _rows(d_total)
    dx, partials = kernels.backward(_rows(dy), residual, rows, weight.contiguous(), statistics, biased, tile)
    d_weight, d_bias = kernels.parameter_gradients(partials, weight, biased)
    return dx.view(total.shape), d_weight, weight.new_empty(0) if d_bias is None else d_bias


norm_backward = operator("norm_backward", launch_backward, replayed=True)


@torch.library.register_fake(norm_backward)
def _(dy, d_total, total, weight, statistics, biased, options):
    d_weight = weight.new_empty(weight.shape)
    return total.new_empty(total.shape), d_weight, weight.new_empty(weight.shape if biased else 0)


def _setup_context(ctx, inputs, output) -> None:
    x, delta, weight, bias, _, _, ctx.options = inputs
    ctx.summed, ctx.biased = delta is not None, bias is not None
    ctx.save_for_backward(output[0] if ctx.summed else x, weight, output[2])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_total, dy, _):
    if dy is None:  # only the sum was used
        assert ctx.summed
        return d_total, d_total, None, None, None, None, None
    total, weight, statistics = ctx.saved_tensors
    d_total = d_total if ctx.summed else None
    dx, d_weight, d_bias = call(norm_backward, dy, d_total, total, weight, statistics, ctx.biased, ctx.options)
    return dx, dx if ctx.summed else None, d_weight, d_bias if ctx.biased else None, None, None, None


register_autograd(norm_forward, _backward, _setup_context)


def _rows(t: Tensor) -> Tensor:
    """[tokens, dim], contiguous."""
    return t.reshape(-1, t.shape[-1]).contiguous()
