"""Attention of one new token per row to a cache of keys and values, in plain PyTorch, written to be read.

Shapes are static and the position stays in device memory: a CUDA graph can hold the call.
"""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> ReferenceAttentionStep:
    return ReferenceAttentionStep(spec)


class ReferenceAttentionStep:
    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        self.slopes = Slopes(spec)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        position: Tensor,
        first: Tensor,
        sinks: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> Tensor:
        """softmax(softcap(scale * q k^T) - slope * (position - slot)) v over the slots that a row may see.

        q: [batch, n_heads, head_dim]; k_cache: [batch, n_kv_heads, capacity, head_dim], v_cache: [batch, n_kv_heads, capacity,
        width], the new token's key and value included; position: one integer on the device, the slot of the new token; first:
        [batch], each row's first valid slot. All other slots may hold anything, NaN included. sinks: [n_heads], a further score of
        each head. pages: [batch, n], the caches are pages of some slots each, [page, n_kv_heads, slots, width], and these are a
        row's, in order.

        Returns [batch, n_heads, width]; zeros for a row that may see no slot.
        """
        spec = self.spec
        if pages is not None:
            k_cache, v_cache = (side_by_side(cache, pages, 2) for cache in (k_cache, v_cache))
        slots = torch.arange(k_cache.shape[2], device=q.device)
        distance = position - slots
        hidden = (distance < 0) | (slots < first[:, None])  # [batch, capacity]
        if spec.sliding_window is not None:
            hidden = hidden | (distance >= spec.sliding_window)

        wide = torch.promote_types(q.dtype, torch.float32)
        by_group = q.unflatten(1, (spec.n_kv_heads, -1))
        scores = (by_group @ k_cache.transpose(-1, -2)).to(wide) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        if (slopes := self.slopes.on(q.device)) is not None:
            scores = scores - slopes.to(wide).view(spec.n_kv_heads, -1, 1) * distance
        over_heads = hidden[:, None, None]
        scores = scores.masked_fill(over_heads, float("-inf"))
        if sinks is not None:
            sink = sinks.to(wide).view(spec.n_kv_heads, -1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : len(slots)].masked_fill(over_heads, 0.0)
        # A weight of zero is not enough: 0 * NaN is NaN.
        v = v_cache.masked_fill(hidden[:, None, :, None], 0.0)
        return (weights.to(v.dtype) @ v).flatten(1, 2)


def side_by_side(entries: Tensor, pages: Tensor, dim: int) -> Tensor:
    """A copy of each row's pages one behind the other: entries [page, …, slots, …], of which dim is that of the slots, pages
    [batch, n] -> [batch, …, n * slots, …]."""
    return entries[pages].movedim(1, dim).flatten(dim, dim + 1)


class Slopes:
    """ALiBi's slopes as a tensor, made once per device: a copy from the host cannot be captured in a CUDA graph."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec
        self._made: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor | None:
        """[n_heads] in fp32; None without ALiBi."""
        slopes = self.spec.slopes
        if slopes is None:
            return None
        if device not in self._made:
            self._made[device] = torch.tensor(slopes, dtype=torch.float32, device=device)
        return self._made[device]
