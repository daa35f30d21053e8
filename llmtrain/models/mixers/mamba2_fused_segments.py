"""The inside of a Mamba-2 mixer over segments of sequences that ranks share, as one operator.

That of kernels/mamba_mixer/triton.py with two exchanges in each direction.

Forward: the convolution, whose first outputs of a segment need the tokens before it; what each segment adds to the state, of which
all ranks learn; then the scan from the true state, and the norm. Backward: the norm; the gradient of the state before each segment
if that behind it were zero, of which all ranks learn; then the scan's backward from the true state to the true gradient, and the
convolution's. So nothing is added to the output afterwards, and the decays' gradients are those of the scan alone.

Saved for the backward: the inputs, the outputs of the convolution and of the scan, the norm's reciprocal root mean squares, the
states before the segments, and the weights by which each segment's state enters the others.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from llmtrain.kernels.conv1d import triton as conv1d
from llmtrain.kernels.gated_norm import triton as gated_norm
from llmtrain.kernels.mamba_mixer.triton import Launch, Sizes, TritonMambaMixer
from llmtrain.kernels.operators import operator, register_autograd
from llmtrain.kernels.ssd import segments as ssd_segments
from llmtrain.kernels.ssd import triton as ssd
from llmtrain.models.mixers.mamba2_segments import SegmentScan, entering
from llmtrain.models.segments import ContextParallelRanks


def segment_mixer(
    mixer: TritonMambaMixer, context: SegmentScan,
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
) -> Tensor:  # fmt: skip
    """zxbcdt: [batch, 2 * n, sum of widths], this rank's two segments, of at least d_conv - 1 tokens; the others as of `mixer`.
    Returns [batch, 2 * n, d_inner].
    """
    spec, segments = mixer.spec, context.segments
    limits = spec.ssd.dt_limit or (None, None)
    norm = (spec.gated_norm.n_groups, spec.gated_norm.eps, spec.gated_norm.norm_before_gate)
    parameters = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
    masks = (context.ids, context.conv_ids, context.reads, context.between)
    ranks = (segments.rank, segments.size, segments.group)
    return segment_mixer_forward(
        zxbcdt.contiguous(), *parameters, *masks, *ranks, spec.ssd.n_groups, *limits, *norm, mixer.options
    )[0]


def launch_forward(
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
    ids: Tensor | None, conv_ids: Tensor | None, reads: Tensor, between: Tensor, rank: int, size: int, group: str,
    n_groups: int, dt_min: float | None, dt_max: float | None, norm_groups: int, eps: float, norm_first: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output; and for the backward the convolution's, y before the norm, its reciprocal root mean squares, the states before
    the segments, the weights of the own segments' states in those of all, [batch, heads, 2, count], and the tokens that the
    convolution sees before each segment and at its start, [batch * 2, 2 * (width - 1), channels].
    """
    launch, segments = Launch.parse(options), ContextParallelRanks(rank, size, GroupName(group))
    sizes = Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups)
    scan, reach = ssd.Launch.parse(launch.ssd), _reach(conv_weight)
    z, xBC, dt = sizes.parts(segments.fold(zxbcdt))
    ends = segments.gathering(xBC[:, xBC.shape[1] - reach :]) if reach else None
    convolved = conv1d.launch_forward(xBC, conv_weight, conv_bias, ids, launch.conv1d)
    heads = xBC.new_empty((len(xBC), 0, sizes.channels))
    if ends is not None:
        heads = torch.cat((segments.from_before(ends()), xBC[:, :reach]), dim=1)
        found = conv1d.launch_forward(heads, conv_weight, conv_bias, _head_ids(conv_ids, reach), launch.conv1d)
        convolved[:, :reach] = found[:, reach:]
    x, B, C = sizes.conv_parts(convolved)
    added, log_decay = ssd_segments.added_state(x, dt, A, B, dt_bias, ids, (dt_min, dt_max), scan)
    gathered = segments.gathering(torch.cat((added.flatten(2), log_decay[..., None]), dim=-1))()
    weights = entering(gathered[..., -1] * math.log(2), reads, between)
    own = segments.own_slots
    before = (weights[:, :, own] @ gathered[..., :-1].transpose(1, 2)).transpose(1, 2).contiguous().view(added.shape)
    inputs = (x, dt, A, B, C, D, dt_bias, before, ids, dt_min, dt_max, launch.ssd)
    y = ssd.launch_forward(*inputs, with_final_state=False)[0].flatten(-2)
    out, r = gated_norm.launch_forward(y, z, norm_weight, norm_groups, eps, norm_first, launch.gated_norm)
    enters = weights[..., own].transpose(2, 3).contiguous()
    return segments.unfold(out), convolved, y, r, before, enters, heads


segment_mixer_forward = operator("segment_mixer_forward", launch_forward)


@torch.library.register_fake(segment_mixer_forward)
def _(
    zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, ids, conv_ids, reads, between, rank, size, group,
    n_groups, dt_min, dt_max, norm_groups, eps, norm_first, options,
):  # fmt: skip
    sizes, reach = Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups), _reach(conv_weight)
    batch, tokens = zxbcdt.shape[:2]
    rows, n, head_dim = 2 * batch, tokens // 2, sizes.d_inner // sizes.n_heads
    return (
        zxbcdt.new_empty((batch, tokens, sizes.d_inner)),
        zxbcdt.new_empty((rows, n, sizes.channels)),
        zxbcdt.new_empty((rows, n, sizes.d_inner)),
        zxbcdt.new_empty((rows * n, norm_groups), dtype=torch.float32),
        zxbcdt.new_empty((rows, sizes.n_heads, head_dim, sizes.d_state), dtype=torch.float32),
        zxbcdt.new_empty((batch, sizes.n_heads, 2, 2 * size), dtype=torch.float32),
        zxbcdt.new_empty((rows, 2 * reach, sizes.channels)),
    )


def launch_backward(
    d_out: Tensor,
    zxbcdt: Tensor, conv_weight: Tensor, conv_bias: Tensor | None, A: Tensor, D: Tensor, dt_bias: Tensor, norm_weight: Tensor,
    ids: Tensor | None, conv_ids: Tensor | None, convolved: Tensor, y: Tensor, r: Tensor, before: Tensor, enters: Tensor,
    heads: Tensor, rank: int, size: int, group: str,
    n_groups: int, dt_min: float | None, dt_max: float | None, norm_first: bool, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of zxbcdt, contiguous, and of the six parameters (of no bias: empty)."""
    launch, segments = Launch.parse(options), ContextParallelRanks(rank, size, GroupName(group))
    sizes = Sizes.of(zxbcdt, conv_weight, A, norm_weight, n_groups)
    scan, reach = ssd.Launch.parse(launch.ssd), _reach(conv_weight)
    limits = (dt_min, dt_max)
    z, xBC, dt = sizes.parts(segments.fold(zxbcdt))
    d_zxbcdt = torch.empty(zxbcdt.shape, dtype=zxbcdt.dtype, device=zxbcdt.device)
    dz, dxBC, d_dt = sizes.parts(segments.fold(d_zxbcdt))
    # dxBC is written last; until then its memory holds dy.
    dy, _, partials = gated_norm.partial_backward(
        segments.fold(d_out.contiguous()),
        y,
        z,
        norm_weight,
        r,
        norm_first,
        launch.gated_norm,
        dz,
        dxBC[..., : sizes.d_inner],
    )
    d_norm_weight = gated_norm.kernels.parameter_gradient(partials, norm_weight)
    x, B, C = sizes.conv_parts(convolved)
    dy = dy.view(x.shape)
    own = ssd_segments.initial_gradient(dy, dt, A, C, dt_bias, ids, limits, scan)
    gathered = segments.gathering(own.flatten(2))()
    d_final = (enters @ gathered.transpose(1, 2)).transpose(1, 2).reshape(own.shape)
    d_conv = torch.empty(xBC.shape, dtype=xBC.dtype, device=xBC.device)
    scan_partials = ssd.empty_param_partials(dt, scan)
    into = (*(parts := sizes.conv_parts(d_conv))[:1], d_dt, *parts[1:], torch.empty_like(before), scan_partials)
    ssd.backward_into(dy, d_final, x, dt, A, B, C, D, dt_bias, before, ids, *limits, scan, into)
    del dy
    if reach:
        d_heads = torch.cat((torch.zeros_like(d_conv[:, :reach]), d_conv[:, :reach]), dim=1)
        d_heads, of_heads = conv1d.partial_backward(
            d_heads, heads, conv_weight, conv_bias, _head_ids(conv_ids, reach), launch.conv1d
        )
        behind = segments.gathering(d_heads[:, :reach])
        d_conv[:, :reach] = 0
        _, partials = conv1d.partial_backward(d_conv, xBC, conv_weight, conv_bias, ids, launch.conv1d, dxBC)
        partials = torch.cat((partials, of_heads))
        dxBC[:, :reach] += d_heads[:, reach:]
        dxBC[:, dxBC.shape[1] - reach :] += segments.from_behind(behind())
    else:
        _, partials = conv1d.partial_backward(d_conv, xBC, conv_weight, conv_bias, ids, launch.conv1d, dxBC)
    d_conv_weight, d_conv_bias = conv1d.kernels.parameter_gradients(partials, conv_weight, conv_bias)
    d_A, d_D, d_bias = ssd.parameter_gradients(scan_partials, A, D, dt_bias)
    return d_zxbcdt, d_conv_weight, d_conv_bias, d_A, d_D, d_bias, d_norm_weight


segment_mixer_backward = operator("segment_mixer_backward", launch_backward)


@torch.library.register_fake(segment_mixer_backward)
def _(d_out, zxbcdt, conv_weight, conv_bias, A, D, dt_bias, norm_weight, *_):
    parameters = (conv_weight, conv_bias, A, D, dt_bias, norm_weight)
    return zxbcdt.new_empty(zxbcdt.shape), *(
        conv_weight.new_empty(0) if t is None else t.new_empty(t.shape) for t in parameters
    )


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, ...]) -> None:
    tensors, (ids, conv_ids), ranks = inputs[:7], inputs[7:9], inputs[11:14]
    n_groups, dt_min, dt_max, _, _, norm_first, options = inputs[14:]
    ctx.save_for_backward(*tensors, ids, conv_ids, *output[1:])
    ctx.how = (*ranks, n_groups, dt_min, dt_max, norm_first, options)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, d_out: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
    assert d_out is not None, "only the first output is differentiable"
    saved = ctx.saved_tensors
    d_zxbcdt, d_weight, d_bias, *found = segment_mixer_backward(d_out, *saved, *ctx.how)
    return d_zxbcdt, d_weight, None if saved[2] is None else d_bias, *found, *[None] * 14


register_autograd(segment_mixer_forward, _backward, _setup_context)


def _reach(conv_weight: Tensor) -> int:
    """Tokens that the convolution sees before one."""
    return conv_weight.shape[1] - 1


def _head_ids(conv_ids: Tensor | None, reach: int) -> Tensor | None:
    """Documents of the tokens before each segment and at its start."""
    return None if conv_ids is None else conv_ids[:, : 2 * reach].contiguous()
