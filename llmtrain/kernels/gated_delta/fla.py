"""flash-linear-attention's Triton kernels of the gated delta rule, where the package fla-core is installed.

Its own autograd function does not trace; here its forward and backward are operators, which compiled layers hold.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.kernels.gated_delta.operators import OperatorRule, differentiable
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.operators import operator
from llmtrain.kernels.platform import Platform

CHUNK = 64
"""Tokens of a chunk: fla's default."""
_OPTIONS = {"scale", "initial_state", "cu_seqlens", "chunk_size"}
"""Of fla's forward and backward functions."""


def build(spec: GatedDeltaSpec, platform: Platform, variant: str) -> FlaGatedDelta:
    return FlaGatedDelta()


class FlaGatedDelta(OperatorRule):
    """The signature of ReferenceGatedDelta. document_ids may also fall.

    Raises UserError for a version of fla-core that cannot be imported, or has other functions.
    """

    def __init__(self) -> None:
        module = "fla.ops.gated_delta_rule.chunk"
        checked("gated_delta", (module, "chunk_gated_delta_rule_fwd"), (module, "chunk_gated_delta_rule_bwd"))
        super().__init__(fla_gated_delta_forward)


def checked(operation: str, *functions: tuple[str, str]) -> None:
    """Raise UserError where one of fla's functions, (module, name), cannot be imported, or takes other options."""
    instead = "fla-core 0.6.0 is known to work; install it, or set backend: reference"
    try:
        found = [getattr(importlib.import_module(module), name) for module, name in functions]
    except (ImportError, AttributeError) as error:
        raise UserError(f"the {operation} backend 'fla' cannot be used: {error}; {instead}") from error
    if not all(inspect.signature(function).parameters.keys() >= _OPTIONS for function in found):
        raise UserError(f"the {operation} backend 'fla' cannot be used: its functions take other options; {instead}")


class Sequences:
    """A batch as fla takes it: as it is, or, with documents, as one row that holds them all."""

    def __init__(self, document_ids: Tensor | None):
        self.cu_seqlens: Tensor | None = None
        if document_ids is not None:
            starts = torch.ones_like(document_ids, dtype=torch.bool)
            starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
            self.cu_seqlens = F.pad(starts.flatten().nonzero()[:, 0], (0, 1), value=starts.numel())
            self.last = starts.sum(1).cumsum(0) - 1  # documents of each row
            self.first = torch.cat([self.last.new_zeros(1), self.last[:-1] + 1])

    def tokens(self, *tensors: Tensor) -> list[Tensor]:
        """[batch, T, ...] -> what fla reads."""
        return [(t if self.cu_seqlens is None else t.flatten(0, 1)[None]).contiguous() for t in tensors]

    def states(self, of_rows: Tensor | None, at: str) -> Tensor | None:
        """States of rows, [batch, ...], for the first or the last document of each; zeros for the others."""
        if of_rows is None or self.cu_seqlens is None:
            return of_rows
        of_documents = of_rows.new_zeros(self.cu_seqlens.numel() - 1, *of_rows.shape[1:])
        of_documents[getattr(self, at)] = of_rows
        return of_documents

    def of_rows(self, of_documents: Tensor, at: str) -> Tensor:
        """The inverse of `states`."""
        return of_documents if self.cu_seqlens is None else of_documents[getattr(self, at)]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """y, the last state, and for the backward pass the running sums of log_decay and the inverses of chunks."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_fwd  # type: ignore[import-not-found]

    sequences = Sequences(document_ids)
    tensors = sequences.tokens(q, k, v, log_decay, beta)
    cumsum, y, inverse, final, *_ = chunk_gated_delta_rule_fwd(
        *tensors, scale=1.0, initial_state=sequences.states(initial_state, "first"), output_final_state=True,
        cu_seqlens=sequences.cu_seqlens, chunk_size=CHUNK,
    )  # fmt: skip
    shape = v.shape[:3]
    final = sequences.of_rows(final, "last").contiguous()
    return y.to(v.dtype).view(v.shape), final, cumsum.view(shape), inverse.view(*shape, CHUNK)


def like_inputs(
    gradients: Iterable[tuple[Tensor, Tensor]],
    sequences: Sequences,
    d_initial: Tensor | None,
    initial_state: Tensor | None,
) -> tuple[Tensor, ...]:
    """Gradients in the types and shapes of their tensors, then the initial state's (if there is none: empty)."""
    found = [gradient.to(like.dtype).view(like.shape) for gradient, like in gradients]
    if initial_state is None:
        return *found, found[0].new_empty(0)
    return *found, sequences.of_rows(d_initial, "first").to(initial_state.dtype).contiguous()


fla_gated_delta_forward = operator("fla_gated_delta_forward", launch_forward)


def launch_backward(
    dy: Tensor, d_final: Tensor | None, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
    initial_state: Tensor | None, document_ids: Tensor | None, cumsum: Tensor, inverse: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v, log_decay, beta, and of the initial state (if there is none: empty)."""
    from fla.ops.gated_delta_rule.chunk import chunk_gated_delta_rule_bwd  # type: ignore[import-not-found]

    sequences = Sequences(document_ids)
    q_, k_, v_, cumsum, beta_, inverse, dy = sequences.tokens(q, k, v, cumsum, beta, inverse, dy)
    dq, dk, dv, d_beta, d_decay, d_initial, *_ = chunk_gated_delta_rule_bwd(
        q_, k_, v_, cumsum, beta_, inverse, scale=1.0, initial_state=sequences.states(initial_state, "first"), do=dy,
        dht=sequences.states(d_final, "last"), cu_seqlens=sequences.cu_seqlens, chunk_size=CHUNK,
    )  # fmt: skip
    gradients = zip((dq, dk, dv, d_decay, d_beta), (q, k, v, log_decay, beta), strict=True)
    return like_inputs(gradients, sequences, d_initial, initial_state)


fla_gated_delta_backward = operator("fla_gated_delta_backward", launch_backward)


def _kept(k: Tensor, v: Tensor, log_decay: Tensor) -> tuple[Tensor, ...]:
    return v.new_empty(v.shape[:3], dtype=torch.float32), k.new_empty((*v.shape[:3], CHUNK))


differentiable(fla_gated_delta_forward, fla_gated_delta_backward, _kept)
