"""Compressed convolutional attention (CCA, arXiv:2510.04476), as ZAYA1 has it: attention whose queries and keys pass a depthwise
and a per-head causal convolution, beside a residual path, and are brought to one length; half of the values are delayed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant, uniform
from llmtrain.models.layers import NO_CHANGES, Change, product
from llmtrain.models.mixers.attention import Attention, AttentionCache, AttentionContext
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.compressed_attention import CompressedAttentionBlock
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks


class HeadConvolutions(nn.Module):
    """A causal depthwise convolution, then one that mixes the channels of each head. Before a sequence's start the first sees
    zeros, and the second what the first makes of zeros: its bias.

    weight: [heads * head_dim, width]; head_weight: [heads * head_dim, head_dim, head_width]; each with a bias.
    """

    def __init__(self, heads: int, head_dim: int, width: int, head_width: int):
        super().__init__()
        channels = heads * head_dim
        self.head_dim = head_dim
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels))
        self.head_weight = nn.Parameter(torch.empty(channels, head_dim, head_width))
        self.head_bias = nn.Parameter(torch.empty(channels))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        """Bounds of nn.Conv1d, by its number of inputs."""
        own, head = (1 / math.sqrt(weight[0].numel()) for weight in (self.weight, self.head_weight))
        bounds = {"weight": own, "bias": own, "head_weight": head, "head_bias": head}
        return {name: uniform(-bound, bound) for name, bound in bounds.items()}

    def split(self, ranks: TensorRanks, parts: list[Part]) -> None:
        for name, _ in list(self.named_parameters()):
            shard_parameter(self, name, ranks.slices(0, parts))

    def forward(self, x: Tensor, ids: Tensor | None) -> Tensor:
        """x: [batch, T, heads * head_dim]; ids: [batch, T], documents -> like x."""
        y, heads = self.bias, self.head_weight.unflatten(0, (-1, self.head_dim))
        for back in range(self.weight.shape[1]):
            y = y + earlier(x, back, ids) * self.weight[:, -1 - back]
        z = self.head_bias
        for back in range(heads.shape[-1]):
            read = earlier(y, back, ids, self.bias).unflatten(-1, (-1, self.head_dim))
            z = z + torch.einsum("bthi,hoi->btho", read, heads[..., -1 - back]).flatten(-2)
        return z


def earlier(x: Tensor, back: int, ids: Tensor | None, before: Tensor | None = None) -> Tensor:
    """Each token's entry of the token `back` places before it, [batch, T, channels] -> like x. before: [channels], of tokens before
    the first, and of those of another document by ids [batch, T]; default: zeros."""
    if back == 0:
        return x
    shifted = F.pad(x, (0, 0, back, 0))[:, : x.shape[1]]
    if ids is None and before is None:
        return shifted
    index = torch.arange(x.shape[1], device=x.device) < back
    apart = index[None, :, None]
    if ids is not None:
        apart = apart | (F.pad(ids, (back, 0))[:, : ids.shape[1]] != ids)[..., None]
    return torch.where(apart, x.new_zeros(()) if before is None else before.to(x.dtype), shifted)


@dataclass
class CompressedContext(AttentionContext):
    """Documents [batch, T] of whole sequences; of segments those of each with the `reach` tokens before it. cache: to read on from,
    with the span that is read."""

    ids: Any = None
    cache: Any = None
    span: Span | None = None


class CompressedAttention(Attention):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    def __init__(
        self,
        block: CompressedAttentionBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        heads, self.reach = block.n_heads + block.kv_heads, block.reach
        self.conv = HeadConvolutions(heads, self.spec.head_dim, block.d_conv, block.d_head_conv)
        self.key_scale = nn.Parameter(torch.empty(block.kv_heads))
        self.undelayed = self.widths[2] // 2

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return super().init_rules(scale) | {"key_scale": constant(1.0)}

    def split(self, ranks: TensorRanks) -> None:
        (q, kv), whole = self.head_parts(), self.undelayed
        first, count, _ = ranks.share(kv.units)
        super().split(ranks)
        self.conv.split(ranks, [q, kv])
        shard_parameter(self, "key_scale", ranks.slices(0, [Part(kv.units)]))
        self.undelayed = min(max(whole - first * kv.width, 0), count * kv.width)

    @property
    def context_key(self) -> tuple:
        return (*super().context_key, self.reach)

    def prepare(self, seq_len: int, device: torch.device, document_ids: Tensor | None) -> CompressedContext:
        return CompressedContext(**vars(super().prepare(seq_len, device, document_ids)), ids=document_ids)

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> CompressedContext:
        context, length = super().segment_context(segments, seq_len, device, document_ids), seq_len // segments.count
        begins = [(max(at * length - max(self.reach, 1), 0), at * length + length) for at in segments.own]
        ids = [None if document_ids is None else document_ids[:, a:b] for a, b in begins]
        return CompressedContext(**vars(context), ids=ids)

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> CompressedCache:
        window = torch.zeros(
            batch, max(self.reach, 1), sum(self.widths), dtype=getattr(torch, self.spec.dtype), device=device
        )
        return CompressedCache(**vars(super().empty_cache(batch, capacity, device)), window=window)

    def prefix_refusal(self) -> str:
        return "the convolutions of compressed attention have no form for packed requests that share a prefix"

    def prefix_context(self, tree: PrefixTree) -> None:
        return None

    def project(
        self, x: Tensor, context: AttentionContext, changes: Mapping[str, Change] = NO_CHANGES
    ) -> tuple[Tensor, ...]:
        assert isinstance(context, CompressedContext)
        qkv, bias = product(self.wqkv, x, changes.get("wqkv")), None
        if self.wqkv.bias is not None:  # of the delayed values, also where no token is before
            bias = self.wqkv.bias[-self.widths[2] :]
            qkv = torch.cat([qkv[..., : -self.widths[2]], qkv[..., -self.widths[2] :] - bias], dim=-1)
        if context.span is not None:
            window, qkv = context.cache.window, context.span.without_padding(qkv)
            read = torch.cat([window, qkv.to(window.dtype)], dim=1)
            window.copy_(read[:, -window.shape[1] :])
            mixed = [t[:, window.shape[1] :] for t in self.mix(read, None)]
        elif context.segments is not None:
            length, rows = x.shape[1] // 2, context.segments.with_before(qkv, max(self.reach, 1))
            halves = [self.mix(row, ids) for row, ids in zip(rows, context.ids, strict=True)]
            mixed = [torch.cat([t[:, -length:] for t in pair], dim=1) for pair in zip(*halves, strict=True)]
        else:
            mixed = self.mix(qkv, context.ids)
        qk, v = mixed
        v = v if bias is None else v + bias
        q, k, v = (t.unflatten(-1, (-1, self.spec.head_dim)) for t in (*self.with_residual(qk, qkv), v))
        return self._to_one_length(q), self._to_one_length(k, self.key_scale), v

    def mix(self, qkv: Tensor, ids: Tensor | None) -> tuple[Tensor, Tensor]:
        """Queries and keys behind the convolutions, and values with the delayed half. qkv: [batch, T, channels]."""
        qk, v = qkv.split([sum(self.widths[:2]), self.widths[2]], dim=-1)
        now, delayed = v.tensor_split((self.undelayed,), dim=-1)
        return self.conv(qk, ids), torch.cat([now, earlier(delayed, 1, ids)], dim=-1)

    def with_residual(self, qk: Tensor, qkv: Tensor) -> list[Tensor]:
        """Queries and keys, each with the mean of both before the convolutions: a query's with its key head, a key head's of all
        its queries with it."""
        q, k, _ = qkv.split(self.widths, dim=-1)
        q = q.unflatten(-1, (self.spec.n_kv_heads, -1, self.spec.head_dim))
        mean = (q + k.unflatten(-1, (self.spec.n_kv_heads, 1, -1))) * 0.5
        beside = (mean.flatten(-3), mean.mean(-2).flatten(-2))
        return [a + b for a, b in zip(qk.split(self.widths[:2], dim=-1), beside, strict=True)]

    def _to_one_length(self, t: Tensor, scale: Tensor | None = None) -> Tensor:
        """Each head's vector of length sqrt(head_dim), or that times its scale, computed in fp32 or wider."""
        wide = t.to(torch.promote_types(t.dtype, torch.float32))
        length = F.normalize(wide, dim=-1, eps=torch.finfo(t.dtype).eps) * self.spec.head_dim**0.5
        return (length if scale is None else length * scale.to(wide.dtype)[:, None]).to(t.dtype)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        conv = 2 * seq_len * (self.conv.weight.numel() + self.conv.head_weight.numel())
        trained = self.conv.weight.requires_grad
        return super().flops(seq_len, causal) + Flops.with_weight(Work(convolution=conv), trained)


@dataclass
class CompressedCache(AttentionCache):
    """Keys and values, and the last projections that the convolutions and the delayed values read, [batch, reach, channels]."""

    window: Tensor

    def context(self, span: Span) -> CompressedContext:
        return CompressedContext(**vars(super().context(span)), cache=self, span=span)
