"""The causal convolution of a recurrent layer over segments of sequences that the ranks of a context-parallel group share."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.models.mixers.base import MixerContext
from llmtrain.models.segments import ContextParallelRanks


@dataclass(frozen=True)
class SegmentConvolution(MixerContext):
    """A convolution's context for this rank's segments; the base of a recurrence's.

    Of packed batches, else None: ids: [batch * 2, n], own tokens' documents; conv_ids: the same with those before a segment
    that the convolution sees.
    """

    segments: ContextParallelRanks
    ids: Tensor | None
    conv_ids: Tensor | None

    @staticmethod
    def documents(
        segments: ContextParallelRanks, seq_len: int, document_ids: Tensor | None, conv_width: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """`ids` and `conv_ids`. document_ids: [batch, seq_len] of whole sequences, integers that never fall; None: one document
        per sequence."""
        if document_ids is None:
            return None, None
        device, length, reach = document_ids.device, seq_len // segments.count, conv_width - 1
        own = torch.tensor(segments.own, device=device)
        # Before the sequence's start there are zeros, whose document does not matter.
        seen = (own[:, None] * length + torch.arange(-reach, length, device=device)).clamp(min=0)
        return segments.fold(segments.take(document_ids)), document_ids[:, seen].flatten(0, 1)

    def reaches_one(self, tokens: int, width: int) -> bool:
        """True if the convolution sees tokens of no more than one segment before each of two that hold `tokens` together."""
        return tokens // 2 >= width - 1

    def convolve(self, conv: Any, x: Tensor) -> Tensor:
        """Causal convolution, which sees the width - 1 tokens before each segment. x: [batch, 2 * n, channels] -> like x."""
        reach, length = conv.spec.width - 1, x.shape[1] // 2
        rows = self.segments.with_before(x, reach)
        padded = [F.pad(row, (0, 0, reach + length - row.shape[1], 0)) for row in rows]
        y = conv(torch.stack(padded, dim=1).flatten(0, 1), self.conv_ids)
        return self.segments.unfold(y[:, reach:])
