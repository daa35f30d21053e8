"""PyTorch's FlashAttention-2 for sequences of several lengths (torch.nn.attention.varlen): documents, and sliding windows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from llmtrain.kernels.attention import flash_implementation
from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> VarlenAttention:
    return VarlenAttention(spec)


@dataclass(frozen=True)
class VarlenContext:
    """starts: int32 [n], first tokens of the batch's documents, its sequences one behind the other, and its length at the end.
    longest: tokens of the longest document, or more."""

    starts: Tensor
    longest: int


class VarlenAttention:
    """Causal attention within each document."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        flash_implementation.use(self, "FA2")
        # Counts the tokens before a query, where the spec counts the query too; -1: all of them.
        self.window = (-1 if spec.sliding_window is None else spec.sliding_window - 1, 0)

    def prepare(self, seq_len: int, device: torch.device, ids: Tensor | None = None) -> VarlenContext | None:
        """ids: [batch, T], integers; a document is a run of equal ids. None: a document per sequence, whose context is None,
        for the batch is not known here. With ids it waits for the GPU: how many documents there are decides a shape.
        That number and the longest are rounded up to powers of two, by documents without tokens, so that a compiled layer
        sees few of them.
        """
        if ids is None:
            return None
        # Padding sees itself alone here: its rows of the output are no one's, and no document sees it.
        found = documents(ids.clamp_min(-1) + 1)
        at = torch.arange(ids.numel(), device=device).view(ids.shape)
        first = at[found.starts == torch.arange(seq_len, device=device)]
        starts = F.pad(first, (0, power_of_2(len(first)) - len(first) + 1), value=ids.numel()).to(torch.int32)
        return VarlenContext(starts, min(seq_len, power_of_2(int(starts.diff().max()))))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: VarlenContext | None) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k, v: [batch, T, n_kv_heads, head_dim] -> like q."""
        batch, seq_len = q.shape[:2]
        if context is None:
            starts = torch.arange(0, batch * seq_len + 1, seq_len, dtype=torch.int32, device=q.device)
            context = VarlenContext(starts, seq_len)
        flat = (t.flatten(0, 1) for t in (q, k, v))
        longest = context.longest
        out = varlen_attn(
            *flat, context.starts, context.starts, longest, longest, scale=self.spec.scale, window_size=self.window
        )
        assert isinstance(out, Tensor)
        return out.unflatten(0, (batch, seq_len))


def power_of_2(n: int) -> int:
    """The least power of two that is n or more."""
    return 1 << (n - 1).bit_length()
