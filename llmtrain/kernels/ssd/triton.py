"""Mamba-2's state-space duality in Triton: the operator, its gradient, and the order of its kernels.

Forward: chunk_cumsum; then the sequential chunk scan, with the state in registers (reads x once, writes y once), or state
passing and then the chunk scan of all chunks in parallel (reads x twice, writes and reads states, writes y once).
Backward: chunk_cumsum; state passing of the states and, in reverse, of their gradients (reads x and dy, writes both);
intra_chunk_bwd (reads x, dy and gradients of states once, writes dx once); intra_chunk_halves_bwd where tiles are half a chunk
(reads half of x, dy and dx, writes half of dx); inter_chunk_bwd (reads x, dy, states and their gradients once; the states before
chunks twice where d_state is large); chunk_cumsum_bwd. No atomics: every sum has a fixed order.

Matrix products are in the dtype of x, or those with states in fp16 (`Launch.fp16_states`); decays, time steps and the state
that is passed on are fp32. The chunk size is a launch parameter of each direction, not the spec's: results depend on it only
by rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.ssd import block_scaled_fp16, chunk_cumsum, split_heads, state_passing
from llmtrain.kernels.ssd import inter_chunk_bwd as inter_chunk
from llmtrain.kernels.ssd import intra_chunk_bwd as intra_chunk
from llmtrain.kernels.ssd import intra_chunk_halves_bwd as intra_chunk_halves
from llmtrain.kernels.ssd import triton_forward as forward
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton_launch import Launch


def default_launch(spec: SSDSpec, platform: Platform) -> Launch:
    """Launch parameters from the tuning table, for this device's number of multiprocessors."""
    shape = {"head_dim": spec.head_dim, "d_state": spec.d_state}
    return replace(tuning.select("ssd", spec.dtype, shape, platform).launch, num_sms=platform.num_sms)


def build(spec: SSDSpec, platform: Platform, variant: str) -> TritonSSD:
    return TritonSSD(spec, default_launch(spec, platform))


class TritonSSD:
    """The signature of ReferenceSSD. document_ids may also fall.

    x, dt, B and C may be slices of a projection, without a copy if the last dim of x, B and C is contiguous.
    """

    def __init__(self, spec: SSDSpec, launch: Launch):
        self.spec, self.launch = spec, launch
        self.options = launch.dump()

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x: [batch, T, heads, head_dim]; dt: [batch, T, heads], before bias and softplus; A, D, dt_bias: [heads],
        A negative; B, C: [batch, T, groups, d_state]; initial_state: [batch, heads, head_dim, d_state];
        document_ids: [batch, T], integers: where they change, a document begins, and the state before it is dropped
        (the initial state belongs to the first). Returns y like x, and the state after the last token in fp32.
        """
        spec, (batch, seq_len) = self.spec, x.shape[:2]
        assert x.shape == (batch, seq_len, spec.n_heads, spec.head_dim) and dt.shape == x.shape[:3]
        assert B.shape == C.shape == (batch, seq_len, spec.n_groups, spec.d_state)
        assert x.dtype == B.dtype == C.dtype
        assert A.shape == D.shape == dt_bias.shape == (spec.n_heads,)
        dt_min, dt_max = spec.dt_limit or (None, None)
        return call(ssd_forward, x, dt, A, B, C, D, dt_bias, initial_state, document_ids, dt_min, dt_max, self.options)


def launch_forward(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, initial_state: Tensor | None,
    document_ids: Tensor | None, dt_min: float | None, dt_max: float | None, options: str,
    with_final_state: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y, and the last state (an empty tensor without with_final_state)."""
    launch = Launch.parse(options)
    x, B, C = (_unit_stride(t) for t in (x, B, C))
    shape, parts = x.shape, launch.head_parts(x.shape[3])
    if parts > 1:
        x, initial_state = split_heads.split(x, parts), split_heads.split_state(initial_state, parts)
    dA_cumsum, _, seq_idx = chunk_cumsum.chunk_cumsum_fwd(
        dt, A, dt_bias, document_numbers(document_ids), (dt_min, dt_max), launch.chunk_size, False, parts
    )
    final_state = None
    if with_final_state:
        final_state = torch.empty((x.shape[0], *x.shape[2:], B.shape[3]), dtype=torch.float32, device=x.device)
    y = scan(x, B, C, D, dA_cumsum, seq_idx, initial_state, launch, final_state)
    if final_state is None:
        return y.view(shape), x.new_empty(0)
    return y.view(shape), final_state.view(shape[0], *shape[2:], B.shape[3])


def scan(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, initial_state: Tensor | None,
    launch: Launch, final_state: Tensor | None,
) -> Tensor:  # fmt: skip
    """y of all heads, or parts of heads, by what chunk_cumsum_fwd returns. D: [heads] or [batch, heads, T] (triton_forward.py).
    final_state: filled if given."""
    initial = _state(initial_state)
    if (sequential := launch.sequential_scan_for(x.shape[0] * x.shape[2], x.shape[3])) is not None:
        sizes = (launch.chunk_size, launch.input_precision, sequential)
        return forward.sequential_chunk_scan(x, B, C, D, dA_cumsum, seq_idx, initial, *sizes, final_state)
    passing = (launch.chunk_size, launch.input_precision, launch.state_passing)
    states = state_passing.state_passing_fwd(x, B, dA_cumsum, seq_idx, initial, *passing, final_state)
    sizes = (launch.chunk_size, launch.input_precision, launch.chunk_scan, launch.num_sms)
    return forward.chunk_scan(x, B, C, D, dA_cumsum, seq_idx, states, *sizes)


ssd_forward = operator(
    "ssd_forward",
    launch_forward,
    "(Tensor x, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor D, Tensor dt_bias, Tensor? initial_state, "
    "Tensor? document_ids, float? dt_min, float? dt_max, str options) -> (Tensor, Tensor)",
    replayed=True,
)


@torch.library.register_fake(ssd_forward)
def _(x, dt, A, B, C, D, dt_bias, initial_state, document_ids, dt_min, dt_max, options):
    final_state = x.new_empty((x.shape[0], *x.shape[2:], B.shape[3]), dtype=torch.float32)
    return x.new_empty(x.shape), final_state


def launch_backward(
    dy: Tensor, d_final_state: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    dt_bias: Tensor, initial_state: Tensor | None, document_ids: Tensor | None, dt_min: float | None,
    dt_max: float | None, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of x, dt, A, B, C, D, dt_bias and the initial state (empty, if there was none)."""
    launch = Launch.parse(options)
    dx, d_dt, dB, dC = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, dt, B, C))
    d_initial, param_partials = initial_gradient(initial_state, x), empty_param_partials(dt, launch)
    tensors = (dy, d_final_state, x, dt, A, B, C, D, dt_bias, initial_state, document_ids)
    backward_into(*tensors, dt_min, dt_max, launch, (dx, d_dt, dB, dC, d_initial, param_partials))
    d_A, d_D, d_bias = parameter_gradients(param_partials, A, D, dt_bias)
    return dx, d_dt, d_A, dB, dC, d_D, d_bias, d_initial


def backward_into(
    dy: Tensor, d_final_state: Tensor | None, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor,
    dt_bias: Tensor, initial_state: Tensor | None, document_ids: Tensor | None, dt_min: float | None,
    dt_max: float | None, launch: Launch, into: Sequence[Tensor],
) -> None:  # fmt: skip
    """Write the gradients into the tensors of `into`: of x, dt, B and C (possibly slices of a contiguous tensor; those of B and
    C of the same), of the initial state, if there is one, and the partial sums for parameter_gradients.
    """
    dx, d_dt, dB, dC, d_initial, param_partials = into
    parts, chunk = launch.head_parts(x.shape[3]), launch.chunk_size_bwd
    dA_cumsum, largest_dt, seq_idx = chunk_cumsum.chunk_cumsum_fwd(
        dt, A, dt_bias, document_numbers(document_ids), (dt_min, dt_max), chunk, launch.fp16_states, parts
    )
    terms = scan_gradients(
        dy, d_final_state, x, B, C, D, dA_cumsum, largest_dt, seq_idx, initial_state, launch, (dx, dB, dC, d_initial)
    )
    chunk_cumsum.chunk_cumsum_bwd(dt, A, dt_bias, (dt_min, dt_max), dA_cumsum, *terms, chunk, d_dt, param_partials)


def scan_gradients(
    dy: Tensor, d_final_state: Tensor | None, x: Tensor, B: Tensor, C: Tensor, D: Tensor, dA_cumsum: Tensor,
    largest_dt: Tensor | None, seq_idx: Tensor | None, initial_state: Tensor | None, launch: Launch, into: Sequence[Tensor],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Write the gradients of x, B, C and the initial state, if there is one; return the terms of chunk_cumsum_bwd. dA_cumsum: as
    chunk_cumsum_fwd returns it for launch.chunk_size_bwd, changed as chunk_cumsum_bwd says."""
    dx, dB, dC, d_initial = into
    B, C = _unit_stride(B), _unit_stride(C)
    chunk, tile, precision = launch.chunk_size_bwd, launch.tile, launch.input_precision
    bc = block_scaled_fp16.scale_bc(B, C, tile, launch.fp16_states, (dB, dC))
    dy, x, states, ddA_terms, dCB, cb_diagonal, dx = value_gradients(
        dy, d_final_state, x, bc, D, dA_cumsum, largest_dt, seq_idx, initial_state, launch, (dx, d_initial)
    )
    dCB_halves = None
    if launch.intra_chunk_halves_bwd:
        halves = (chunk, precision, launch.intra_chunk_halves_bwd, launch.num_sms)
        dCB_halves = intra_chunk_halves.intra_chunk_halves_bwd(dy, x, B, C, dA_cumsum, seq_idx, ddA_terms, dx, *halves)
    _, _, ddA_state, ddA_blocks = inter_chunk.inter_chunk_bwd(
        *(dy, x, B, C, dA_cumsum, seq_idx, dCB, dCB_halves, states, ddA_terms),
        *(chunk, tile, precision, launch.inter_chunk_bwd, launch.num_sms, dB, dC),
    )
    return ddA_terms, cb_diagonal, ddA_state, ddA_blocks


def value_gradients(
    dy: Tensor, d_final_state: Tensor | None, x: Tensor, bc: block_scaled_fp16.ScaledBC, D: Tensor, dA_cumsum: Tensor,
    largest_dt: Tensor | None, seq_idx: Tensor | None, initial_state: Tensor | None, launch: Launch, into: Sequence[Tensor],
    with_dCB: bool = True,
) -> tuple[Tensor, Tensor, state_passing.States, Tensor, Tensor | None, Tensor, Tensor]:  # fmt: skip
    """Write the gradients of x, but for what intra_chunk_halves_bwd adds, and of the initial state. Return dy, x and dx by parts of
    heads, first and last, and between them the states, ddA_terms, dCB and B_j . C_j of intra_chunk_bwd."""
    dx, d_initial = into
    if (parts := launch.head_parts(x.shape[3])) > 1:
        dy, x = (split_heads.split(t, parts) for t in (dy, x))
        initial_state, d_final_state = (split_heads.split_state(t, parts) for t in (initial_state, d_final_state))
        dx = dx.view(x.shape)  # a view: it is written
        d_initial = d_initial if initial_state is None else d_initial.view(initial_state.shape)
    chunk, tile, precision = launch.chunk_size_bwd, launch.tile, launch.input_precision
    dy, x = _unit_stride(dy), _unit_stride(x)
    initial, d_final = _state(initial_state), _state(d_final_state)
    d_initial_out = None if initial is None else d_initial
    both = launch.state_passing_bwd_for(x.shape[0] * x.shape[2], bc.B.shape[3], x.shape[3])
    passing = (chunk, tile, precision, both)
    states = state_passing.state_passing_bwd(
        x, dy, bc, dA_cumsum, largest_dt, seq_idx, initial, d_final, d_initial_out, *passing
    )
    ddA_terms = torch.empty((*dA_cumsum.shape[:3], 3, chunk), dtype=torch.float32, device=x.device)
    _, dCB, cb_diagonal = intra_chunk.intra_chunk_bwd(
        *(dy, x, bc, D, dA_cumsum, seq_idx, states, ddA_terms),
        *(chunk, tile, precision, launch.intra_chunk_bwd, launch.num_sms, dx, with_dCB),
    )
    return dy, x, states, ddA_terms, dCB, cb_diagonal, dx


def initial_gradient(initial_state: Tensor | None, like: Tensor) -> Tensor:
    """Memory for the gradient of the initial state; empty if there is none."""
    return like.new_empty((0,) if initial_state is None else initial_state.shape, dtype=torch.float32)


def empty_param_partials(dt: Tensor, launch: Launch) -> Tensor:
    """Memory for the gradients of A, D and dt_bias by sequence and chunk, [batch, chunks, 3, heads]."""
    batch, seq_len, n_heads = dt.shape
    return dt.new_empty((batch, -(-seq_len // launch.chunk_size_bwd), 3, n_heads), dtype=torch.float32)


def parameter_gradients(param_partials: Tensor, A: Tensor, D: Tensor, dt_bias: Tensor) -> list[Tensor]:
    found = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (A, D, dt_bias)]
    reduce_partials(param_partials.flatten(0, 1).flatten(1), *found)
    return found


ssd_backward = operator("ssd_backward", launch_backward, replayed=True)


@torch.library.register_fake(ssd_backward)
def _(dy, d_final_state, x, dt, A, B, C, D, dt_bias, initial_state, document_ids, dt_min, dt_max, options):
    return *(t.new_empty(t.shape) for t in (x, dt, A, B, C, D, dt_bias)), initial_gradient(initial_state, x)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.dt_min, ctx.dt_max, ctx.options = inputs
    ctx.state_dtype = None if tensors[7] is None else tensors[7].dtype
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_final_state):
    tensors = ctx.saved_tensors
    if dy is None:
        dy = torch.zeros(tensors[0].shape, dtype=tensors[0].dtype, device=tensors[0].device)
    *found, d_initial = call(ssd_backward, dy, d_final_state, *tensors, ctx.dt_min, ctx.dt_max, ctx.options)
    return *found, None if ctx.state_dtype is None else d_initial.to(ctx.state_dtype), None, None, None, None


register_autograd(ssd_forward, _backward, _setup_context)


def _unit_stride(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def document_numbers(document_ids: Tensor | None) -> Tensor | None:
    return None if document_ids is None else document_ids.to(torch.int32).contiguous()


def _state(state: Tensor | None) -> Tensor | None:
    return None if state is None else state.to(torch.float32).contiguous()
