"""The inside of a Mamba-2 mixer as one operator: the Triton kernels of its three parts, and one gradient buffer.

As three operators, autograd copies the gradients of z, xBC and dt into that of the projection's output, and those of x, B and
C into that of the convolution's. Here the kernels write them in place.

Saved for the backward: the inputs (the projection's output and the parameters); the outputs of the convolution and of
the scan, as Launch.keep says; the norm's reciprocal root mean squares, fp32 [tokens, groups].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from llmtrain.kernels.conv1d import triton as conv1d
from llmtrain.kernels.gated_norm import triton as gated_norm
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.options import Options
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd import triton as ssd

Keep = Literal["all", "scan", "nothing"]


@dataclass(frozen=True)
class Launch(Options):
    """conv1d, ssd, gated_norm: the parts' launch parameters, as text.

    keep: the outputs saved for the backward rather than computed again: "all", the convolution's and the scan's, each about as
        large as the mixer's own; "scan": not the convolution's, which is one pass over memory; "nothing".
    """

    conv1d: str
    ssd: str
    gated_norm: str
    keep: Keep = "all"

    @property
    def keeps_conv(self) -> bool:
        return self.keep == "all"

    @property
    def keeps_scan(self) -> bool:
        return self.keep != "nothing"


def default_launch(spec: MambaMixerSpec, platform: Platform) -> Launch:
    parts = ((conv1d, spec.conv1d), (ssd, spec.ssd), (gated_norm, spec.gated_norm))
    return Launch(*(part.build(of_part, platform, "").options for part, of_part in parts))


def build(spec: MambaMixerSpec, platform: Platform, variant: str) -> TritonMambaMixer:
    return TritonMambaMixer(spec, default_launch(spec, platform))


class TritonMambaMixer:
    """The signature of the reference. document_ids may also fall."""

    def __init__(self, spec: MambaMixerSpec, launch: Launch):
        self.spec, self.options = spec, launch.dump()

    def __call__(
        self, zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None,
        A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The reference's arguments. The output is contiguous."""
        spec, scan, norm = self.spec, self.spec.ssd, self.spec.gated_norm
        assert zxbcdt.shape[2:] == (sum(spec.widths),) and norm_weight.shape == (norm.dim,)
        assert conv_weight.shape == (spec.conv1d.channels, spec.conv1d.width)
        assert A.shape == D.shape == dt_bias.shape == (scan.n_heads,)
        assert document_ids is None or document_ids.shape == zxbcdt.shape[:2]
        if document_ids is not None:  # converted once for both directions
            document_ids = document_ids.to(torch.int32).contiguous()
        tensors = (zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, initial_state, document_ids)
        limits = scan.dt_limit or (None, None)
        norm_settings = (norm.n_groups, norm.eps, norm.norm_before_gate)
        return call(mamba_mixer_forward, *tensors, scan.n_groups, *limits, *norm_settings, self.options)[0]


def launch_forward(
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None,
    n_groups: int, dt_min: float | None, dt_max: float | None, norm_groups: int, eps: float, norm_first: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output; and for the backward the convolution's, y before the norm, and its reciprocal root mean squares (empty what
    is not kept).
    """
    launch, sizes = Launch.parse(options), Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups)
    z, xBC, dt = sizes.parts(zxbcdt)
    convolved = conv1d.launch_forward(xBC, conv_weight, conv_bias, document_ids, launch.conv1d)
    x, B, C = sizes.conv_parts(convolved)
    scan = (A, B, C, D, dt_bias, initial_state, document_ids, dt_min, dt_max, launch.ssd)
    y = ssd.launch_forward(x, dt, *scan, with_final_state=False)[0].flatten(-2)
    out, r = gated_norm.launch_forward(y, z, norm_weight, norm_groups, eps, norm_first, launch.gated_norm)
    convolved = convolved if launch.keeps_conv else y.new_empty(0)
    return out, convolved, y if launch.keeps_scan else y.new_empty(0), r


mamba_mixer_forward = operator("mamba_mixer_forward", launch_forward, replayed=True)


@torch.library.register_fake(mamba_mixer_forward)
def _(
    zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, initial_state, document_ids,
    n_groups, dt_min, dt_max, norm_groups, eps, norm_first, options,
):  # fmt: skip
    launch, sizes = Launch.parse(options), Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups)
    batch, seq_len = zxbcdt.shape[:2]
    out = zxbcdt.new_empty((batch, seq_len, sizes.d_inner))
    r = zxbcdt.new_empty((batch * seq_len, norm_groups), dtype=torch.float32)
    convolved = out.new_empty((batch, seq_len, sizes.channels) if launch.keeps_conv else (0,))
    y = out.new_empty(out.shape if launch.keeps_scan else (0,))
    return out, convolved, y, r


def launch_backward(
    d_out: Tensor,
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, convolved: Tensor, y: Tensor, r: Tensor,
    n_groups: int, dt_min: float | None, dt_max: float | None, norm_first: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of zxbcdt, contiguous, the six parameters (of no bias: empty), and the initial state (if none: empty)."""
    launch, sizes = Launch.parse(options), Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups)
    scan, (z, xBC, dt) = ssd.Launch.parse(launch.ssd), sizes.parts(zxbcdt)
    d_zxbcdt = torch.empty(zxbcdt.shape, dtype=zxbcdt.dtype, device=zxbcdt.device)
    d_initial, scan_partials = ssd.initial_gradient(initial_state, zxbcdt), ssd.empty_param_partials(dt, scan)
    dz, dxBC, d_dt = sizes.parts(d_zxbcdt)
    # dxBC is written last; until then its memory holds dy, or the recomputed output of the convolution.
    if launch.keeps_conv:
        dy = dxBC[..., : sizes.d_inner]
    else:
        convolved, dy = conv1d.launch_forward(xBC, conv_weight, conv_bias, document_ids, launch.conv1d, dxBC), None
    x, B, C = sizes.conv_parts(convolved)
    inputs = (x, dt, A, B, C, D, dt_bias, initial_state, document_ids)
    if not launch.keeps_scan:
        y = ssd.launch_forward(*inputs, dt_min, dt_max, launch.ssd, with_final_state=False)[0].flatten(-2)
    dy, _, partials = gated_norm.partial_backward(d_out, y, z, norm_weight, r, norm_first, launch.gated_norm, dz, dy)
    d_norm_weight = gated_norm.kernels.parameter_gradient(partials, norm_weight)
    del y, partials
    d_conv = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
    dx, dB, dC = sizes.conv_parts(d_conv)
    ssd.backward_into(
        dy.view(x.shape), None, *inputs, dt_min, dt_max, scan, (dx, d_dt, dB, dC, d_initial, scan_partials)
    )
    del dy
    _, partials = conv1d.partial_backward(d_conv, xBC, conv_weight, conv_bias, document_ids, launch.conv1d, dxBC)
    d_conv_weight, d_conv_bias = conv1d.kernels.parameter_gradients(partials, conv_weight, conv_bias)
    d_A, d_D, d_bias = ssd.parameter_gradients(scan_partials, A, D, dt_bias)
    return d_zxbcdt, d_conv_weight, d_conv_bias, d_A, d_D, d_bias, d_norm_weight, d_initial


mamba_mixer_backward = operator("mamba_mixer_backward", launch_backward, replayed=True)


@torch.library.register_fake(mamba_mixer_backward)
def _(
    d_out, zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, initial_state, document_ids, convolved, y, r,
    n_groups, dt_min, dt_max, norm_first, options,
):  # fmt: skip
    found = [
        conv_weight.new_empty(0) if t is None else t.new_empty(t.shape)
        for t in (zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight)
    ]
    return *found, ssd.initial_gradient(initial_state, zxbcdt)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.n_groups, ctx.dt_min, ctx.dt_max, _, _, ctx.norm_first, ctx.options = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, d_out, *_):
    assert d_out is not None, "only the first output is differentiable"
    saved = ctx.saved_tensors
    conv_bias, initial_state = saved[2], saved[7]
    how = (ctx.n_groups, ctx.dt_min, ctx.dt_max, ctx.norm_first, ctx.options)
    d_zxbcdt, d_weight, d_bias, *found, d_initial = call(mamba_mixer_backward, d_out, *saved, *how)
    d_initial = None if initial_state is None else d_initial.to(initial_state.dtype)
    return d_zxbcdt, d_weight, None if conv_bias is None else d_bias, *found, d_initial, *[None] * 8


register_autograd(mamba_mixer_forward, _backward, _setup_context)


@dataclass(frozen=True)
class Sizes:
    """Division of the columns of the projection's output and of the convolution's."""

    d_inner: int
    channels: int
    n_heads: int
    n_groups: int
    d_state: int

    @classmethod
    def of(cls, zxbcdt: Tensor, conv_weight: Tensor, A: Tensor, norm_weight: Tensor, n_groups: int) -> Sizes:
        d_inner, channels, n_heads = norm_weight.shape[0], conv_weight.shape[0], A.shape[0]
        assert zxbcdt.shape[2] == d_inner + channels + n_heads
        return cls(d_inner, channels, n_heads, n_groups, (channels - d_inner) // (2 * n_groups))

    def parts(self, zxbcdt: Tensor) -> tuple[Tensor, ...]:
        """Views: z, xBC and dt."""
        return zxbcdt.split([self.d_inner, self.channels, self.n_heads], dim=-1)

    def conv_parts(self, xBC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Views: x, [batch, T, heads, head_dim], B and C, [batch, T, groups, d_state]."""
        of_group = self.n_groups * self.d_state
        x, B, C = xBC.split([self.d_inner, of_group, of_group], dim=-1)
        B, C = (t.unflatten(-1, (self.n_groups, self.d_state)) for t in (B, C))
        return x.unflatten(-1, (self.n_heads, self.d_inner // self.n_heads)), B, C
