"""Mamba-3's scan in Triton: the operator, its gradient, and the order of its kernels.

It is Mamba-2's scan (ssd/triton.py) of q and k that every head has of its own, in which a token has one weight in its own output
and another in later ones. Forward: rotation_sums and rotate (rotations.py: biases, rotary, and a token's factor in its own output),
decays_fwd, and the scan. Backward: rotate again, which takes less memory than to keep each head's q and k; decays_fwd; the scan's
gradients of v; keys_bwd; decays_bwd, rotate_bwd. No atomics: every sum has a fixed order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.kernels.mamba3 import decays, rotations, rotations_bwd
from llmtrain.kernels.mamba3.keys_bwd import keys_bwd
from llmtrain.kernels.mamba3.reference import State, with_token_before
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd import split_heads
from llmtrain.kernels.ssd.triton import default_launch, document_numbers, initial_gradient, scan, value_gradients
from llmtrain.kernels.ssd.triton_launch import Launch


def build(spec: Mamba3Spec, platform: Platform, variant: str) -> TritonMamba3:
    launch = default_launch(spec.scan, platform)
    # Where no gradients are summed over heads, chunks of one tile spare the kernel between halves more than their states cost.
    scaled = launch.fp16_states and launch.tile >= rotations.TILE
    return TritonMamba3(replace(launch, chunk_size_bwd=launch.tile, intra_chunk_halves_bwd=None, fp16_states=scaled))


class TritonMamba3:
    """The signature of ReferenceMamba3. document_ids may also fall. q, k and v may be slices of a projection."""

    def __init__(self, launch: Launch):
        self.options = launch.dump()

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
        k_bias: Tensor, D: Tensor, state: State | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """q, k: [batch, T, groups, d_state] and so on, as in ReferenceMamba3 -> y like v, and the last state: in fp32, but its v is
        that of the last token as it is."""
        h = None if state is None else with_token_before(state, dt, later)
        tensors = (q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D)
        first = None if state is None else state.angle
        y, h, angle, last_k, _ = call(mamba3_forward, *tensors, h, first, document_ids, self.options)
        return y, State(h, angle, last_k, v[:, -1])


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor, k_bias: Tensor,
    D: Tensor, h: Tensor | None, first: Tensor | None, document_ids: Tensor | None, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y; h, angles and k of the last token; and for the backward pass the angles at the end of each tile."""
    launch, shape = Launch.parse(options), v.shape
    tensors = _in_order(q, k, log_decay, dt, later, rate, q_bias, k_bias, D)
    q, k, log_decay, dt, later, rate, q_bias, k_bias, D = tensors
    sums = rotations.rotation_sums(rate, dt)
    rotated, skip, _, angle, last_k = rotations.rotate(
        q, k, dt, later, rate, q_bias, k_bias, D, _wide(first), sums, launch.num_sms
    )
    parts = launch.head_parts(shape[3])
    v = v if v.stride(3) == 1 else v.contiguous()
    if parts > 1:
        v, h = split_heads.split(v, parts), split_heads.split_state(h, parts)
    dA_cumsum, _, seq_idx = decays.decays_fwd(
        log_decay, dt, later, document_numbers(document_ids), launch.chunk_size, False, parts
    )
    final = torch.empty((v.shape[0], *v.shape[2:], q.shape[3]), dtype=torch.float32, device=v.device)
    y = scan(v, rotated.B, rotated.C, skip, dA_cumsum, seq_idx, h, launch, final)
    return y.view(shape), final.view(shape[0], *shape[2:], q.shape[3]), angle, last_k, sums


mamba3_forward = operator("mamba3_forward", launch_forward, replayed=True)


@torch.library.register_fake(mamba3_forward)
def _(q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D, h, first, document_ids, options):
    (batch, seq_len, heads, head_dim), d_state, angles = v.shape, q.shape[3], rate.shape[2]
    shapes = ((head_dim, d_state), (angles,), (d_state,))
    last = (v.new_empty((batch, heads, *shape), dtype=torch.float32) for shape in shapes)
    sums = v.new_empty((batch, heads, angles, -(-seq_len // rotations.TILE)), dtype=torch.float32)
    return v.new_empty(v.shape), *last, sums


def launch_backward(
    dy: Tensor, d_final: Tensor | None, d_angle: Tensor | None, d_last_k: Tensor | None, q: Tensor, k: Tensor, v: Tensor,
    log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor, k_bias: Tensor, D: Tensor, h: Tensor | None,
    first: Tensor | None, document_ids: Tensor | None, sums: Tensor, options: str,
) -> tuple[
    Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor
]:  # fmt: skip
    """The gradients of q to first; of h and first empty if there are none."""
    launch, like = Launch.parse(options), (q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D)
    tensors = _in_order(q, k, log_decay, dt, later, rate, q_bias, k_bias, D)
    q, k, log_decay, dt, later, rate, q_bias, k_bias, D = tensors
    inputs, ids, first = (q, k, dt, later, rate, q_bias, k_bias, D), document_numbers(document_ids), _wide(first)
    chunk, parts = launch.chunk_size_bwd, launch.head_parts(v.shape[3])
    scaled = chunk if launch.fp16_states and q.element_size() == 2 else None
    rotated, skip, score, _, _ = rotations.rotate(*inputs, first, sums, launch.num_sms, scaled)
    dA_cumsum, largest, seq_idx = decays.decays_fwd(log_decay, dt, later, ids, chunk, launch.fp16_states, parts)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    d_h = initial_gradient(h, v)
    dy, v, states, terms, *_ = value_gradients(
        dy, d_final, v, rotated, skip, dA_cumsum, largest, seq_idx, h, launch, (dv, d_h), with_dCB=False
    )
    dq, dk, d_angles, ddA_state, ddA_blocks = keys_bwd(
        dy,
        v,
        rotated,
        dA_cumsum,
        seq_idx,
        states,
        terms,
        rate.shape[2],
        chunk,
        launch.input_precision,
        launch.inter_chunk_bwd,
    )
    d_log_decay, d_weight, d_skip = decays.decays_bwd(dt, later, ids, dA_cumsum, terms, ddA_state, ddA_blocks, chunk)
    last = (None if t is None else t.contiguous() for t in (d_angle, d_last_k))
    dq, dk, d_dt, d_later, d_rate, *d_parameters, d_first = rotations_bwd.rotate_bwd(
        dq, dk, d_angles, d_weight, d_skip, *last, score, *inputs, first, sums, ids, launch.num_sms
    )
    found = (dq, dk, dv, d_log_decay, d_dt, d_later, d_rate, *d_parameters)
    gradients = [gradient.to(one.dtype) for gradient, one in zip(found, like, strict=True)]
    return *gradients, d_h, d_first


mamba3_backward = operator("mamba3_backward", launch_backward, replayed=True)
_INPUTS = 13
"""Tensors of the forward operator."""


@torch.library.register_fake(mamba3_backward)
def _(dy, d_final, d_angle, d_last_k, *rest):
    *inputs, h, first, _, _, _ = rest
    gradients = (t.new_empty(t.shape) for t in inputs)
    return *gradients, *(dy.new_empty((0,) if t is None else t.shape, dtype=torch.float32) for t in (h, first))


def _setup_context(ctx, inputs, output) -> None:
    ctx.options = inputs[_INPUTS]
    ctx.save_for_backward(*inputs[:_INPUTS], output[4])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_final, d_angle, d_last_k, _):
    saved = ctx.saved_tensors
    dy = torch.zeros(saved[2].shape, dtype=saved[2].dtype, device=saved[2].device) if dy is None else dy
    *gradients, d_h, d_first = call(mamba3_backward, dy, d_final, d_angle, d_last_k, *saved, ctx.options)
    ends = (None if t is None else d.to(t.dtype) for t, d in ((saved[10], d_h), (saved[11], d_first)))
    return *gradients, *ends, None, None


register_autograd(mamba3_forward, _backward, _setup_context)


def _in_order(q: Tensor, k: Tensor, *others: Tensor) -> list[Tensor]:
    """q and k with their channels side by side, all else contiguous, and what is per token in fp32."""
    q, k = (t if t.stride(3) == 1 else t.contiguous() for t in (q, k))
    *of_tokens, q_bias, k_bias, D = others
    return [q, k, *(t.float().contiguous() for t in of_tokens), *(t.contiguous() for t in (q_bias, k_bias, D))]


def _wide(first: Tensor | None) -> Tensor | None:
    return None if first is None else first.float().contiguous()
