"""flash-linear-attention's Triton kernels of Kimi Delta Attention, where the package fla-core is installed, as operators (see
gated_delta/fla.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels.gated_delta.fla import CHUNK, Sequences, checked, like_inputs
from llmtrain.kernels.gated_delta.operators import OperatorRule, differentiable
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.operators import operator
from llmtrain.kernels.platform import Platform


def build(spec: KimiDeltaSpec, platform: Platform, variant: str) -> FlaKimiDelta:
    return FlaKimiDelta()


class FlaKimiDelta(OperatorRule):
    """The signature of ReferenceKimiDelta. document_ids may also fall.

    Raises UserError for a version of fla-core that cannot be imported, or has other functions.
    """

    def __init__(self) -> None:
        checked("kimi_delta", ("fla.ops.kda.chunk_fwd", "chunk_kda_fwd"), ("fla.ops.kda.chunk_bwd", "chunk_kda_bwd"))
        super().__init__(fla_kimi_delta_forward)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and for the backward pass the running sums of log_decay and two squares of each chunk."""
    from fla.ops.kda.chunk_fwd import chunk_kda_fwd  # type: ignore[import-not-found]

    sequences = Sequences(document_ids)
    tensors = sequences.tokens(q, k, v, log_decay, beta)
    y, final, cumsum, reads, overlaps, *_ = chunk_kda_fwd(
        *tensors, scale=1.0, initial_state=sequences.states(initial_state, "first"), output_final_state=True,
        cu_seqlens=sequences.cu_seqlens, chunk_size=CHUNK,
    )  # fmt: skip
    squares = (t.view(*v.shape[:3], CHUNK) for t in (reads, overlaps))
    final = sequences.of_rows(final, "last").contiguous()
    return y.to(v.dtype).view(v.shape), final, cumsum.view(log_decay.shape), *squares


fla_kimi_delta_forward = operator("fla_kimi_delta_forward", launch_forward)


def launch_backward(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, cumsum: Tensor, reads: Tensor, overlaps: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_decay, beta, and of the initial state (if there is none: empty)."""
    from fla.ops.kda.chunk_bwd import chunk_kda_bwd  # type: ignore[import-not-found]

    sequences = Sequences(document_ids)
    q_, k_, v_, beta_, reads, overlaps, dy, cumsum = sequences.tokens(q, k, v, beta, reads, overlaps, dy, cumsum)
    dq, dk, dv, d_beta, d_decay, d_initial, *_ = chunk_kda_bwd(
        q_, k_, v_, beta_, reads, overlaps, scale=1.0, initial_state=sequences.states(initial_state, "first"), do=dy,
        dht=sequences.states(d_final, "last"), g=cumsum, cu_seqlens=sequences.cu_seqlens, chunk_size=CHUNK,
    )  # fmt: skip
    gradients = zip((dq, dk, dv, d_decay, d_beta), (q, k, v, log_decay, beta), strict=True)
    return like_inputs(gradients, sequences, d_initial, initial_state)


fla_kimi_delta_backward = operator("fla_kimi_delta_backward", launch_backward)


def _kept(k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    squares = (k.new_empty((*v.shape[:3], CHUNK)) for _ in range(2))
    return v.new_empty(log_decay.shape, dtype=torch.float32), *squares


differentiable(fla_kimi_delta_forward, fla_kimi_delta_backward, _kept)
