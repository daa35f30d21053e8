"""Latent attention (MLA, DeepSeek-V2, arXiv:2405.04434): keys and values of all heads are made of one latent per token.

Training makes them, and attends by a kernel whose values have a width of their own. Decoding keeps the latents alone: the maps
from them to keys and values are applied to queries and outputs instead (the absorbed form), where one head of keys, the
latents, is shared by all heads of queries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import registry
from llmtrain.kernels.attention.masked import MaskedAttention
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops
from llmtrain.models.layers import Linear, Norm
from llmtrain.models.mixers.attention import AttentionContext, KernelAttention
from llmtrain.models.mixers.base import MixerCache
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.latent_attention import LatentAttentionBlock
from llmtrain.models.sections.layers import NormConfig
from llmtrain.models.tensor_parallel import Part, TensorRanks


@dataclass
class LatentContext(AttentionContext):
    """read: takes the kernel's place where there is a cache, a function of q and latents."""

    read: Callable[[Tensor, Tensor], Tensor] | None = None


class LatentAttention(KernelAttention):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    context_type = LatentContext

    def __init__(
        self,
        block: LatentAttentionBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        spec, d_model = block.spec(str(dtype).removeprefix("torch."), documents), config.d_model
        super().__init__(block, config, platform, dtype, documents, spec)
        self.rope_dim = block.rope_dim
        self._choose_rotation(block.rope_dim)
        norm = NormConfig(type="rmsnorm", eps=block.latent_eps)
        queries = block.n_heads * block.head_dim
        self.wq = self.wq_a = self.q_norm = self.wq_b = None
        if block.q_rank is None:
            self.wq = Linear(d_model, queries)
        else:
            self.wq_a = Linear(d_model, block.q_rank, block.latent_bias)
            self.q_norm = Norm(block.q_rank, norm)
            self.wq_b = Linear(block.q_rank, queries)
        parts = [block.kv_rank, block.rope_dim]
        self.wkv_a = Linear(d_model, block.latent_dim, block.latent_bias, parts=parts)
        self.kv_norm = Norm(block.kv_rank, norm)
        self.wkv_b = Linear(block.kv_rank, block.n_heads * (block.nope_dim + block.value_dim))
        self.wo = Linear(block.n_heads * block.value_dim, d_model, block.out_bias, residual=True)

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's heads; latents are made on every rank."""
        self.ranks, block = ranks, self.block
        queries = self.wq if self.wq_b is None else self.wq_b
        assert queries is not None
        queries.split_output(ranks, [Part(block.n_heads, block.head_dim)])
        self.wkv_b.split_output(ranks, [Part(block.n_heads, block.nope_dim + block.value_dim)])
        self.wo.split_input(ranks, Part(block.n_heads, block.value_dim))
        n_heads = ranks.share(block.n_heads)[1]
        self._choose(replace(self.spec, n_heads=n_heads, n_kv_heads=n_heads))

    @property
    def absorbed(self) -> AttentionSpec:
        """Attention of all heads to the latents, which are keys and, without their last channels, values."""
        block = self.block
        return replace(self.spec, n_kv_heads=1, head_dim=block.latent_dim, value_dim=block.kv_rank, documents=False)

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> LatentCache:
        spec = self.absorbed
        latents = torch.zeros(batch, 1, capacity, spec.head_dim, dtype=getattr(torch, spec.dtype), device=device)
        step = registry.resolve("attention_step", "auto", spec, self.platform).build(spec, self.platform)
        return LatentCache(self, latents, step, MaskedAttention(spec, self.platform))

    def forward(self, x: Tensor, context: LatentContext) -> Tensor:
        x = x if self.ranks is None else self.ranks.enter(x)
        q, latents = self._queries(x).unflatten(-1, (-1, self.block.head_dim)), self.wkv_a(x)
        latent, k_rope = latents.split([self.block.kv_rank, self.block.rope_dim], dim=-1)
        k_rope = k_rope[..., None, :]
        if context.rotary is not None:
            compiled = context.attend is None and context.read is None
            q_nope, q_rope = q.split([self.block.nope_dim, self.block.rope_dim], dim=-1)
            q_rope, k_rope = (self.rotate if compiled else self.rotate_uncompiled)(q_rope, k_rope, *context.rotary)
            q = torch.cat((q_nope, q_rope), dim=-1)
        latents = torch.cat((self.kv_norm(latent), k_rope.squeeze(-2)), dim=-1)
        if context.read is not None:
            out = context.read(q, latents)
        elif context.segments is not None:
            out = self._attend_segments(q, latents, self.expanded, [], context)
        else:
            k, v = self.expanded(latents)
            out = self.kernel(q, k, v, context.kernel) if context.attend is None else context.attend(q, k, v)
        return self.wo(out.flatten(-2))

    def _queries(self, x: Tensor) -> Tensor:
        if self.wq is not None:
            return self.wq(x)
        assert self.wq_a is not None and self.q_norm is not None and self.wq_b is not None
        return self.wq_b(self.q_norm(self.wq_a(x)))

    def expanded(self, latents: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [batch, T, n_heads, head_dim] and values [batch, T, n_heads, value_dim] of latents [batch, T, latent_dim]."""
        block = self.block
        latent, k_rope = latents.split([block.kv_rank, block.rope_dim], dim=-1)
        made = self.wkv_b(latent).unflatten(-1, (-1, block.nope_dim + block.value_dim))
        k_nope, v = made.split([block.nope_dim, block.value_dim], dim=-1)
        k_rope = k_rope[..., None, :].expand(*k_nope.shape[:-1], -1)
        return torch.cat((k_nope, k_rope), dim=-1), v

    def absorb(self, q: Tensor) -> Tensor:
        """Queries [..., n_heads, head_dim] of the latents: [..., n_heads, kv_rank + rope_dim]."""
        q_nope, q_rope = q.split([self.block.nope_dim, self.block.rope_dim], dim=-1)
        return torch.cat((torch.einsum("...hn,hnr->...hr", q_nope, self._maps()[0]), q_rope), dim=-1)

    def values_of(self, out: Tensor) -> Tensor:
        """Outputs [..., n_heads, value_dim] of weighted sums of the latents, [..., n_heads, kv_rank]."""
        return torch.einsum("...hr,hvr->...hv", out, self._maps()[1])

    def _maps(self) -> tuple[Tensor, ...]:
        """Maps of each head from the latent to keys [n_heads, nope_dim, kv_rank] and values [n_heads, value_dim, kv_rank]."""
        block, weight = self.block, self.wkv_b.weight
        if (
            type(self.wkv_b) is not Linear
        ):  # with adapters, or a weight of fewer bits: what the layer makes of each channel
            weight = self.wkv_b(torch.eye(block.kv_rank, dtype=self.kv_norm.weight.dtype, device=weight.device)).mT
        return weight.unflatten(0, (-1, block.nope_dim + block.value_dim)).split([block.nope_dim, block.value_dim], 1)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        linears = (self.wq, self.wq_a, self.wq_b, self.wkv_a, self.wkv_b, self.wo)
        products = (linear.flops(seq_len) for linear in linears if linear is not None)
        return sum(products, self.kernel_flops(seq_len, causal))


@dataclass
class LatentCache(MixerCache):
    """latents: [batch, 1, capacity, kv_rank + rope_dim]. step, masked: of the absorbed form."""

    slot_dims = {"latents": 2}

    mixer: LatentAttention
    latents: Tensor
    step: Any
    masked: MaskedAttention

    def context(self, span: Span) -> LatentContext:
        rotary = self.mixer.tables_at(span.memoize, span.positions)
        return LatentContext(rotary, None, read=partial(self.read, span=span))

    def read(self, q: Tensor, latents: Tensor, span: Span) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; latents: [batch, T, kv_rank + rope_dim] -> [batch, T, n_heads, value_dim]."""
        mixer, seq_len = self.mixer, q.shape[1]
        span.keep(self.latents, 2, latents[:, :, None])
        if seq_len == 1:
            values = self.latents[..., : mixer.block.kv_rank]
            out = self.step(mixer.absorb(q[:, 0]), self.latents, values, span.slots, span.first, pages=span.pages)
            return mixer.values_of(out)[:, None]
        if span.start == 0:
            q, latents = span.to_front(q), span.to_front(latents)
            if mixer.spec.plain:
                kernel = mixer.kernel
                context = span.memoize(mixer.context_key, lambda: kernel.prepare(seq_len, q.device))
                return span.to_back(kernel(q, *mixer.expanded(latents), context))
            bias = span.memoize(mixer.absorbed, lambda: self.masked.bias(span.slots, span.slots))
            return span.to_back(self._absorbed(q, latents[:, :, None], bias))
        end = span.start + seq_len
        slots = torch.arange(end, device=q.device)
        bias = span.memoize(mixer.absorbed, lambda: self.masked.bias(span.slots, slots, span.first))
        return self._absorbed(q, self.latents[:, :, :end].transpose(1, 2), bias)

    def _absorbed(self, q: Tensor, keys: Tensor, bias: Tensor) -> Tensor:
        """keys: latents, [batch, K, 1, kv_rank + rope_dim]."""
        values = keys[..., : self.mixer.block.kv_rank]
        return self.mixer.values_of(self.masked(self.mixer.absorb(q), keys, values, bias))
