"""The gated delta rule in Triton: the operator, its gradient, and the order of its kernels.

Forward: chunk_wy (all chunks in parallel), state_passing (one chunk after another), chunk_scores (in parallel). Backward:
written_bwd (in parallel), state_passing_bwd (in reverse), chunk_scores_bwd and chunk_wy_bwd (in parallel). The inverse of each
chunk, w, what tokens write and the states between chunks are kept for the backward pass. No atomics: every sum has a fixed order.

Matrix products are in the dtype of q, k and v; decays, the triangular systems and the state that is passed on are fp32. What a
kernel computes is a product's right operand rather than its left, if need be in a transposed product: the left one would have to
go through registers.

On Hopper they are compiled with mma.sync in place of wgmma, by which Triton 3.6 gives wrong gradients here, or reads where it must
not, as it does with fla-core's kernels (its issues 640 and 984). In no preference: with mma.sync they have not run on a GPU yet.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from llmtrain.kernels.gated_delta import chunk_scores, chunk_wy, state_passing
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.triton_launch import Launch, Tile, launch_for
from llmtrain.kernels.platform import Platform, without_wgmma


def build(spec: GatedDeltaSpec, platform: Platform, variant: str) -> TritonGatedDelta:
    return TritonGatedDelta(launch_for(spec, platform))


class TritonGatedDelta:
    """The signature of ReferenceGatedDelta. document_ids may also fall. q, k and v may be slices of a projection."""

    def __init__(self, launch: Launch):
        self.options, self.chunk_size = launch.dump(), launch.chunk_size

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """q: [batch, T, key heads, key_head_dim] and so on, as in ReferenceGatedDelta -> y like v, and the last state in fp32."""
        given = (q, k, v, log_decay, beta, initial_state, document_ids)
        return gated_delta_forward(*given, self.chunk_size, self.options)[:2]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and for the backward pass the inverses of chunks, w, what tokens write, and the states."""
    with without_wgmma():
        return _forward(q, k, v, log_decay, beta, initial_state, document_ids, chunk_size, Launch.parse(options))


def _forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, chunk_size: int, launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = (_heads_in_order(t) for t in (q, k, v))
    log_decay, beta, ids = log_decay.contiguous(), beta.contiguous(), _ids(document_ids, log_decay)
    batch, T, H, V = v.shape
    K, C = k.shape[3], chunk_size
    chunks = triton.cdiv(T, C)
    inverse, w = (k.new_empty((batch, T, H, n)) for n in (C, K))
    u, written, y = (v.new_empty(v.shape) for _ in range(3))
    states = k.new_empty((batch, chunks, H, K, V))
    final = v.new_empty((batch, H, K, V), dtype=torch.float32)
    shape = {"H": H, "SHARE": H // k.shape[2], "K": K, "V": V, "C": C}
    shape |= {"DOCUMENTS": document_ids is not None, "PRECISION": _precision(k)}

    chunk_wy.chunk_wy_kernel[(chunks, batch * H)](
        k, v, log_decay, beta, ids, inverse, w, u, T, *k.stride()[:2], *v.stride()[:2], **shape,
        SOLVE_PRECISION=_precision(k, launch.solve_precision), **_blocks(launch.chunk_wy, K, V),
    )  # fmt: skip
    state_passing.state_passing_kernel[(_programs(launch.state_passing, V), batch * H)](
        k, w, u, log_decay, ids, log_decay if initial_state is None else initial_state.contiguous(), states, written, final,
        T, chunks, *k.stride()[:2], **shape, INITIAL=initial_state is not None, **_all_keys(launch.state_passing, K, V),
    )  # fmt: skip
    chunk_scores.chunk_scores_kernel[(_programs(launch.chunk_scores, V), chunks, batch * H)](
        q, k, log_decay, ids, states, written, y, T, chunks, *q.stride()[:2], *k.stride()[:2], **shape,
        **_blocks(launch.chunk_scores, K, V),
    )  # fmt: skip
    return y, final, inverse, w, written, states


gated_delta_forward = torch.library.custom_op("llmtrain::gated_delta_forward", launch_forward, mutates_args=())


@gated_delta_forward.register_fake
def _(q, k, v, log_decay, beta, initial_state, document_ids, chunk_size, options):
    (batch, T, H, V), K, C = v.shape, k.shape[3], chunk_size
    inverse, w = (k.new_empty((batch, T, H, n)) for n in (C, K))
    states = k.new_empty((batch, (T + C - 1) // C, H, K, V))
    final = v.new_empty((batch, H, K, V), dtype=torch.float32)
    return v.new_empty(v.shape), final, inverse, w, v.new_empty(v.shape), states


def launch_backward(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, inverse: Tensor, w: Tensor, written: Tensor, states: Tensor,
    chunk_size: int, options: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_decay, beta, and of the initial state (if there is none: empty)."""
    given = (dy, d_final, q, k, v, log_decay, beta, initial_state, document_ids, inverse, w, written, states)
    with without_wgmma():
        return _gradients(*given, chunk_size, Launch.parse(options))


def _gradients(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, inverse: Tensor, w: Tensor, written: Tensor, states: Tensor,
    chunk_size: int, launch: Launch,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    like = (q, k, v, log_decay, beta)
    q, k, v, dy = (_heads_in_order(t) for t in (q, k, v, dy))
    log_decay, beta, ids = log_decay.contiguous(), beta.contiguous(), _ids(document_ids, log_decay)
    batch, T, H, V = v.shape
    K, C, share = k.shape[3], chunk_size, H // k.shape[2]
    chunks = triton.cdiv(T, C)
    shape = {"H": H, "SHARE": share, "K": K, "V": V, "C": C}
    shape |= {"DOCUMENTS": document_ids is not None, "PRECISION": _precision(k)}
    of_q, of_k, of_v, of_dy = (t.stride()[:2] for t in (q, k, v, dy))

    d_written, dv = (v.new_empty(v.shape) for _ in range(2))
    chunk_scores.written_bwd_kernel[(chunks, batch * H)](
        q, k, log_decay, ids, dy, d_written, T, *of_q, *of_k, *of_dy, **shape, **_blocks(launch.written_bwd, K, V),
    )  # fmt: skip
    d_states = torch.empty_like(states)
    d_initial = v.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    state_passing.state_passing_bwd_kernel[(_programs(launch.state_passing_bwd, V), batch * H)](
        q, k, w, dy, log_decay, ids, d_written, log_decay if d_final is None else d_final.contiguous(), d_states, d_initial,
        T, chunks, *of_q, *of_k, *of_dy, **shape, FINAL=d_final is not None, INITIAL=initial_state is not None,
        **_all_keys(launch.state_passing_bwd, K, V),
    )  # fmt: skip
    parts = triton.cdiv(K, _width(launch.chunk_scores_bwd.block_keys, K))
    dq, dk_part, dk, dw = (k.new_empty((batch, T, H, K)) for _ in range(4))
    dg_parts = log_decay.new_empty((parts, batch, T, H), dtype=torch.float32)
    chunk_scores.chunk_scores_bwd_kernel[(parts, chunks, batch * H)](
        q, k, log_decay, ids, states, d_states, written, d_written, dy, dq, dk_part, dw, dg_parts,
        T, chunks, batch * T * H, *of_q, *of_k, *of_dy, **shape, **_blocks(launch.chunk_scores_bwd, K, V),
    )  # fmt: skip
    d_log_decay, d_beta = (torch.empty_like(log_decay, dtype=torch.float32) for _ in range(2))
    chunk_wy.chunk_wy_bwd_kernel[(chunks, batch * H)](
        k, v, log_decay, beta, ids, inverse, dw, d_written, dk_part, dg_parts, dk, dv, d_log_decay, d_beta,
        T, batch * T * H, *of_k, *of_v, **shape, PARTS=parts, **_blocks(launch.chunk_wy_bwd, K, V),
    )  # fmt: skip
    if share > 1:
        dq, dk = (t.unflatten(2, (-1, share)).sum(3) for t in (dq, dk))
    found = zip((dq, dk, dv, d_log_decay, d_beta), like, strict=True)
    return *(gradient.to(one.dtype) for gradient, one in found), d_initial


gated_delta_backward = torch.library.custom_op("llmtrain::gated_delta_backward", launch_backward, mutates_args=())


@gated_delta_backward.register_fake
def _(dy, d_final, q, k, v, log_decay, beta, initial_state, *_):
    d_initial = v.new_empty(0) if initial_state is None else initial_state.new_empty(initial_state.shape)
    return *(t.new_empty(t.shape) for t in (q, k, v, log_decay, beta)), d_initial


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.chunk_size, ctx.options = inputs
    ctx.save_for_backward(*tensors, *output[2:])
    ctx.set_materialize_grads(False)


def _backward(ctx, dy, d_final, *_):
    saved = ctx.saved_tensors
    dy = saved[2].new_zeros(saved[2].shape) if dy is None else dy
    *gradients, d_initial = gated_delta_backward(dy, d_final, *saved, ctx.chunk_size, ctx.options)
    return *gradients, None if saved[5] is None else d_initial, None, None, None


gated_delta_forward.register_autograd(_backward, setup_context=_setup_context)


def _heads_in_order(t: Tensor) -> Tensor:
    """[batch, T, heads, channels] whose heads and channels lie side by side."""
    return t if t.stride(3) == 1 and t.stride(2) == t.shape[3] else t.contiguous()


def _ids(document_ids: Tensor | None, unused: Tensor) -> Tensor:
    return unused if document_ids is None else document_ids.contiguous()


def _precision(t: Tensor, of_fp32: str = "ieee") -> str:
    """Precision of products of fp32: as exact as it goes for inputs of fp32."""
    return "ieee" if t.dtype == torch.float32 else of_fp32


def _width(block: int, channels: int) -> int:
    return min(block, max(16, triton.next_power_of_2(channels)))


def _programs(tile: Tile, V: int) -> int:
    return triton.cdiv(V, _width(tile.block_values, V))


def _blocks(tile: Tile, K: int, V: int) -> dict[str, int]:
    sizes = {"BK": _width(tile.block_keys, K), "BV": _width(tile.block_values, V)}
    return sizes | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}


def _all_keys(tile: Tile, K: int, V: int) -> dict[str, int]:
    sizes = {"KP": max(16, triton.next_power_of_2(K)), "BV": _width(tile.block_values, V)}
    return sizes | {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
