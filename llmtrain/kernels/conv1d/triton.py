"""The causal depthwise convolution with SiLU in Triton: the operators and the backend. No atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.conv1d import triton_kernels as kernels
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.conv1d.triton_launch import PROGRAMS_PER_SM, Launch, fitted, narrowed
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform


def default_launch(spec: Conv1dSpec, platform: Platform) -> Launch:
    """Launch parameters from the tuning table, no wider than the channels."""
    tiles = tuning.forward_backward("conv1d", spec.dtype, {"width": spec.width}, platform)
    return Launch(*(narrowed(tile, spec.channels) for tile in tiles), PROGRAMS_PER_SM * platform.num_sms)


def build(spec: Conv1dSpec, platform: Platform, variant: str) -> TritonConv1d:
    return TritonConv1d(spec, default_launch(spec, platform))


class TritonConv1d:
    """The signature of the reference. Sums are in fp32, whatever the dtypes; y has x's dtype."""

    def __init__(self, spec: Conv1dSpec, launch: Launch):
        self.spec, self.options = spec, launch.dump()

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None = None) -> Tensor:
        """x: [batch, T, channels], any slice of a projection without a copy if its channels are contiguous;
        weight: [channels, K]; bias: [channels] or None; document_ids: [batch, T], integers: where they change, a
        document begins, and taps do not reach beyond. Returns a tensor like x, contiguous.
        """
        assert x.shape[2:] == weight.shape[:1] == (self.spec.channels,) and weight.shape[1] == self.spec.width
        assert document_ids is None or document_ids.shape == x.shape[:2]
        return call(conv1d_forward, x, weight, bias, document_ids, self.options)


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, options: str,
    y: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y: memory for the output, possibly a slice of a contiguous tensor; None: allocated."""
    x, launch = _addressable(x), Launch.parse(options)
    tile = fitted(launch.forward, launch.min_programs, *x.shape)
    return kernels.forward(x, weight.contiguous(), bias, _ids(document_ids), tile, y)


conv1d_forward = operator(
    "conv1d_forward",
    launch_forward,
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? document_ids, str options) -> Tensor",
    replayed=True,
)


@torch.library.register_fake(conv1d_forward)
def _(x, weight, bias, document_ids, options):
    return x.new_empty(x.shape)


def launch_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, weight and bias (empty where there is none)."""
    dx, partials = partial_backward(dy, x, weight, bias, document_ids, options)
    return dx, *kernels.parameter_gradients(partials, weight, bias)


def partial_backward(
    dy: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, document_ids: Tensor | None, options: str,
    dx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The gradient of x (written into dx, if given), and the partial sums for parameter_gradients."""
    dy, x, launch = _addressable(dy), _addressable(x), Launch.parse(options)
    tile = fitted(launch.backward, launch.min_programs, *x.shape)
    return kernels.backward(dy, x, weight.contiguous(), bias, _ids(document_ids), tile, dx)


conv1d_backward = operator("conv1d_backward", launch_backward, replayed=True)


@torch.library.register_fake(conv1d_backward)
def _(dy, x, weight, bias, document_ids, options):
    d_bias = weight.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), d_bias


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.options = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, dy):
    x, weight, bias, document_ids = ctx.saved_tensors
    dx, d_weight, d_bias = call(conv1d_backward, dy, x, weight, bias, document_ids, ctx.options)
    return dx, d_weight, None if bias is None else d_bias, None, None


register_autograd(conv1d_forward, _backward, _setup_context)


def _addressable(t: Tensor) -> Tensor:
    """The tensor with contiguous channels, and offsets within a sequence that fit 32 bits."""
    t = t if t.stride(2) == 1 else t.contiguous()
    assert t.shape[1] * max(t.stride(1), t.shape[2]) < 1 << 31
    return t


def _ids(document_ids: Tensor | None) -> Tensor | None:
    return None if document_ids is None else document_ids.to(torch.int32).contiguous()
