"""The gated RMSNorm in Triton: the operators and the backend. No atomics."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.gated_norm import triton_kernels as kernels
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.gated_norm.triton_launch import Launch
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import fitted, narrowed


def default_launch(spec: GatedNormSpec, platform: Platform) -> Launch:
    """Launch parameters from the tuning table, no wider than a group."""
    tiles = tuning.forward_backward("gated_norm", spec.dtype, {"group_size": spec.group_size}, platform)
    return Launch(*(narrowed(tile, spec.group_size) for tile in tiles), platform.num_sms)


def build(spec: GatedNormSpec, platform: Platform, variant: str) -> TritonGatedNorm:
    return TritonGatedNorm(spec, default_launch(spec, platform))


class TritonGatedNorm:
    """The signature of the reference. Computes in fp32, whatever the dtypes; y has x's dtype."""

    def __init__(self, spec: GatedNormSpec, launch: Launch):
        self.spec, self.options = spec, launch.dump()

    def __call__(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """x, z: [..., dim], slices of a projection without a copy if their channels are contiguous; weight: [dim].
        Returns a tensor like x, contiguous.
        """
        spec = self.spec
        assert x.shape == z.shape and x.shape[-1:] == weight.shape == (spec.dim,)
        return call(gated_norm_forward, x, z, weight, spec.n_groups, spec.eps, spec.norm_before_gate, self.options)[0]


def launch_forward(
    x: Tensor, z: Tensor, weight: Tensor, n_groups: int, eps: float, norm_first: bool, options: str
) -> tuple[Tensor, Tensor]:
    """y, and the reciprocal root mean squares, [tokens, n_groups] in fp32."""
    launch, rows = Launch.parse(options), _rows(x)
    tile = fitted(launch.forward, launch.num_sms, len(rows), n_groups)
    y, r = kernels.forward(rows, _rows(z), weight.contiguous(), n_groups, eps, norm_first, tile)
    return y.view(x.shape), r


gated_norm_forward = operator("gated_norm_forward", launch_forward, replayed=True)


@torch.library.register_fake(gated_norm_forward)
def _(x, z, weight, n_groups, eps, norm_first, options):
    return x.new_empty(x.shape), x.new_empty((x.numel() // x.shape[-1], n_groups), dtype=torch.float32)


def launch_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, r: Tensor, norm_first: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, z and weight."""
    dx, dz, partials = partial_backward(dy, x, z, weight, r, norm_first, options)
    return dx, dz, kernels.parameter_gradient(partials, weight)


def partial_backward(
    dy: Tensor, x: Tensor, z: Tensor, weight: Tensor, r: Tensor, norm_first: bool, options: str,
    dz: Tensor | None = None, dx: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x and z, and the partial sums for parameter_gradient. dz, dx: memory for the gradients, slices of
    contiguous tensors; None: allocated.
    """
    launch, rows = Launch.parse(options), _rows(x)
    tile = fitted(launch.backward, launch.num_sms, len(rows), r.shape[1])
    into = (None if t is None else t.view(-1, t.shape[-1]) for t in (dz, dx))
    dx, dz, partials = kernels.backward(_rows(dy), rows, _rows(z), weight.contiguous(), r, norm_first, tile, *into)
    return dx.view(x.shape), dz.view(z.shape), partials


gated_norm_backward = operator("gated_norm_backward", launch_backward, replayed=True)


@torch.library.register_fake(gated_norm_backward)
def _(dy, x, z, weight, r, norm_first, options):
    return x.new_empty(x.shape), z.new_empty(z.shape), weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output) -> None:
    x, z, weight, _, _, ctx.norm_first, ctx.options = inputs
    ctx.save_for_backward(x, z, weight, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, _):
    assert dy is not None, "r is not differentiable"
    return *call(gated_norm_backward, dy, *ctx.saved_tensors, ctx.norm_first, ctx.options), None, None, None, None


register_autograd(gated_norm_forward, _backward, _setup_context)


def _rows(t: Tensor) -> Tensor:
    """[tokens, dim], a view where there can be one, with channels side by side."""
    t = t.reshape(-1, t.shape[-1])
    return t if t.stride(1) == 1 else t.contiguous()
