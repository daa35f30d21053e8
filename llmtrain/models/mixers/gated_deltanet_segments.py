"""A Gated DeltaNet layer's convolution and rule over segments of sequences that the ranks of a context-parallel group share.

The rule is linear in its state: over a segment, state -> A @ state + B, and a token reads y_t + r_t @ state, with r_t a row like
its query. B and y are what the rule makes of a state of zeros; A and r what it makes of the identity, where nothing is written.
Both are one call of the kernel, whose values are the layer's beside as many columns of zeros as a key has channels, and whose
initial state is zeros beside the identity. One all-gather in fp32 gives every rank A and B of all segments, from which
the states before its own follow in the order of the sequence. Autograd runs this backwards: the gradients of A and B are reduced
to the ranks that own the segments, and there enter the rule's backward pass as those of its last state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.models.mixers.segment_convolution import SegmentConvolution
from llmtrain.models.segments import ContextParallelRanks


def with_transition(spec: GatedDeltaSpec) -> GatedDeltaSpec:
    """The rule by which a segment's A and r are computed beside its B and y."""
    return replace(spec, value_head_dim=spec.value_head_dim + spec.key_head_dim)


@dataclass(frozen=True)
class SegmentRule(SegmentConvolution):
    """A Gated DeltaNet layer's context for this rank's segments; the same for all layers with a convolution of this width.

    own: [2], the segments' places. continues: bool [batch, count], of packed batches, else None: whether the document that ends
    the segment before a segment goes on in it.
    """

    own: Tensor
    continues: Tensor | None = None
    kernel: Any = None

    @classmethod
    def of(
        cls,
        segments: ContextParallelRanks,
        seq_len: int,
        device: torch.device,
        document_ids: Tensor | None,
        conv_width: int,
        kernel: Any = None,
    ) -> SegmentRule:
        """The arguments of SegmentConvolution.documents, and the kernel of `with_transition`."""
        ids, conv_ids = cls.documents(segments, seq_len, document_ids, conv_width)
        own, continues = torch.tensor(segments.own, device=device), None
        if document_ids is not None:
            length = seq_len // segments.count
            continues = F.pad(document_ids[:, length::length] == document_ids[:, length - 1 : -1 : length], (1, 0))
        return cls(segments, ids, conv_ids, own, continues, kernel)

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """Apply the rule of `with_transition`, by its own kernel, to the arguments of the layer's, of 2 * n local tokens;
        v: [batch, 2 * n, heads, value_head_dim] -> like v."""
        q, k, v, log_decay, beta = tensors
        values, keys = v.shape[-1], k.shape[-1]
        q, k, v, log_decay, beta = (self.segments.fold(t) for t in (q, k, v, log_decay, beta))
        wide = torch.promote_types(v.dtype, torch.float32)
        identity = F.pad(torch.eye(keys, dtype=wide, device=v.device), (values, 0))
        initial = identity.expand(v.shape[0], v.shape[2], -1, -1)
        y, last = self.kernel(q, k, F.pad(v, (0, keys)), log_decay, beta, initial, document_ids=self.ids)
        y, reads = y.split([values, keys], dim=-1)
        before = self._states_before(last, values).to(v.dtype)
        y = y + (reads.transpose(1, 2) @ before).transpose(1, 2)
        return self.segments.unfold(y)

    def _states_before(self, last: Tensor, values: int) -> Tensor:
        """States before the own segments, [batch * 2, heads, key_head_dim, value_head_dim].

        last: B beside A of the own segments, [batch * 2, heads, key_head_dim, value_head_dim + key_head_dim].
        """
        maps = self.segments.gather(last.unflatten(0, (-1, 2)))  # [batch, count, heads, ...]
        B, A = maps.split([values, last.shape[2]], dim=-1)
        states = [torch.zeros_like(B[:, 0])]
        for at in range(1, self.segments.count):
            state = A[:, at - 1] @ states[-1] + B[:, at - 1]
            if self.continues is not None:
                state = state.masked_fill(~self.continues[:, at, None, None, None], 0.0)
            states.append(state)
        return torch.stack(states, dim=1)[:, self.own].flatten(0, 1)
