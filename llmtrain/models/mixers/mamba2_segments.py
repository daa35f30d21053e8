"""A Mamba-2 layer's convolution and scan over segments of sequences that the ranks of a context-parallel group share.

The scan is linear in its state: y_t = (scan of the segment from a state of zero)_t + exp(log decay up to t) C_t . h, with h the
state before the segment. Every rank scans its segments from zero; one all-gather in fp32 gives it, of every segment, the state
that it adds and its total decay, from which h follows. Autograd runs this backwards: the gradients of h and of the decays are
reduced to the ranks that own the segments, and there enter the scan's backward pass as those of its last state.
Nothing depends on how heads and groups divide, and any backend of the scan will do. Where convolution, scan and norm are our own
kernels, mamba2_fused_segments.py takes the place of all three.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.mixers.segment_convolution import SegmentConvolution
from llmtrain.models.segments import ContextParallelRanks

_RUNNING_SUM = 128  # numbers summed at a time


@dataclass(frozen=True)
class SegmentScan(SegmentConvolution):
    """A Mamba-2 layer's context for this rank's segments; the same for all layers with a convolution of this width.

    reads: bool [batch or 1, count, count], True where a segment (second) sees what a segment (last) adds to the state.
    between: bool [count, count, count], the segments (last) that lie between a segment (second) and a later one (first).
        Both in the order of ContextParallelRanks.slots.
    begun_before: bool [batch * 2, n], of packed batches: tokens whose document began before their segment.
    """

    reads: Tensor
    between: Tensor
    begun_before: Tensor | None = None
    dt_limit: tuple[float, float | None] | None = None

    @classmethod
    def of(
        cls,
        segments: ContextParallelRanks,
        seq_len: int,
        device: torch.device,
        document_ids: Tensor | None,
        conv_width: int,
        dt_limit: tuple[float, float | None] | None = None,
    ) -> SegmentScan:
        """The arguments of SegmentConvolution.documents, and SSDSpec.dt_limit."""
        places = torch.tensor(segments.slots, device=device)
        earlier = places < places[:, None]
        between = earlier.T[None] & earlier[:, None, :]
        ids, conv_ids = cls.documents(segments, seq_len, document_ids, conv_width)
        if document_ids is None or ids is None:
            return cls(segments, ids, conv_ids, earlier[None], between, dt_limit=dt_limit)
        length = seq_len // segments.count
        first, last = document_ids[:, ::length], document_ids[:, length - 1 :: length]  # of the segments
        before = F.pad(last, (1, 0), value=-1)[:, places]  # just before them
        goes_on = before == first[:, places]
        reads = earlier & goes_on[:, :, None] & (before[:, :, None] == last[:, None, places])
        begun_before = ids == before[:, segments.own_slots].reshape(-1, 1)
        return cls(segments, ids, conv_ids, reads, between, begun_before, dt_limit)

    def fused(self, mixer: Any, *tensors: Any) -> Tensor | None:
        if mixer.fused_segments is None or not self.reaches_one(tensors[0].shape[1], mixer.conv.spec.width):
            return None
        return mixer.fused_segments(self, *tensors)

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """Scan with the arguments of the ssd kernel, of 2 * n local tokens; x: [batch, 2 * n, heads, head_dim] -> like x."""
        x, dt, A, B, C, D, dt_bias = tensors
        x, dt, B, C = (self.segments.fold(t) for t in (x, dt, B, C))
        y, added = kernel(x, dt, A, B, C, D, dt_bias, document_ids=self.ids)
        log_decay = _log_decay(self.dt_limit, dt, A, dt_bias, x.dtype)
        before = self._states_before(added, log_decay[:, -1])
        # y_t += exp(log_decay_t) C_t . before, where the document of t began before the segment.
        grouped = before.to(x.dtype).unflatten(1, (C.shape[2], -1)).flatten(2, 3)
        carried = (C.transpose(1, 2) @ grouped.transpose(-1, -2)).transpose(1, 2)  # [rows, n, groups, heads * head_dim]
        decay = log_decay.exp()
        if self.begun_before is not None:
            decay = decay.masked_fill(~self.begun_before[..., None], 0.0)
        return self.segments.unfold((y + carried.reshape(y.shape) * decay[..., None]).to(x.dtype))

    def _states_before(self, added: Tensor, log_decay: Tensor) -> Tensor:
        """States before the own segments.

        added: [batch * 2, heads, head_dim, d_state], what each adds to the state; log_decay: [batch * 2, heads], of whole
        segments -> like added.
        """
        own = torch.cat((added.flatten(2), log_decay[..., None].to(added.dtype)), dim=-1)
        gathered = self.segments.gather_slots(
            own.unflatten(0, (-1, 2))
        )  # [batch, count, heads, head_dim * d_state + 1]
        slots = self.segments.own_slots
        weights = entering(gathered[..., -1], self.reads[:, slots], self.between[slots])
        before = weights @ gathered[..., :-1].transpose(1, 2)  # [batch, heads, 2, head_dim * d_state]
        return before.transpose(1, 2).reshape(added.shape)


def entering(log_decay: Tensor, reads: Tensor, between: Tensor) -> Tensor:
    """Factors of what each segment (last) adds to the state in the state before a segment, [batch, heads, n, count].

    log_decay: [batch, count, heads], of whole segments. reads, between: of SegmentScan, or those of n segments.
    """
    log_between = torch.einsum("ijk,bkh->bhij", between.to(log_decay.dtype), log_decay)
    return log_between.masked_fill(~reads[:, None], float("-inf")).exp()


def _log_decay(
    dt_limit: tuple[float, float | None] | None, dt: Tensor, A: Tensor, dt_bias: Tensor, dtype: torch.dtype
) -> Tensor:
    """Log of the decay from each row's start up to and including each token, [rows, n, heads] in fp32 or wider.

    dt, A, dt_bias: as the kernel's. dtype: of its activations.
    """
    wide = torch.promote_types(dtype, torch.float32)
    dt = F.softplus(dt.to(wide) + dt_bias.to(wide))
    if dt_limit is not None:
        dt = dt.clamp(*dt_limit)
    return running_sum(dt * A.to(wide))


def running_sum(t: Tensor) -> Tensor:
    """Cumulative sum over dim 1 of [rows, n, columns], as products with triangles of ones: see kernels/ssd/reference.py."""
    n = t.shape[1]
    size = min(_RUNNING_SUM, n)
    parts = F.pad(t, (0, 0, 0, -n % size)).unflatten(1, (-1, size))
    within = t.new_ones(size, size).tril() @ parts
    count = parts.shape[1]
    before = t.new_ones(count, count).tril(-1) @ within[:, :, -1]
    return (within + before[:, :, None]).flatten(1, 2)[:, :n]
