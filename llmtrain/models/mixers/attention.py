"""Causal self-attention: MHA, GQA and MQA, with the options of the `attention` block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.attention import prefix_tree as trees
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.models.config import AttentionBlock, ModelConfig, SharedAttentionBlock
from llmtrain.models.flops import Flops
from llmtrain.models.layers import Linear, Norm, rotary_tables
from llmtrain.models.specs import attention_spec


@dataclass
class AttentionContext:
    """What depends on the batch's shape and documents alone; attend: reads keys and values on from a cache instead."""

    rotary: tuple[Tensor, Tensor] | None
    kernel: Any
    attend: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None


class Attention(nn.Module):
    """x: [batch, T, d_in] -> [batch, T, d_out].

    residual: the output goes straight to the residual stream (a shared block's does not). documents: as HybridLM's.
    """

    def __init__(
        self,
        block: AttentionBlock | SharedAttentionBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        *,
        d_in: int | None = None,
        residual: bool = True,
        documents: bool = False,
    ):
        super().__init__()
        self.block, self.platform = block, platform
        self.spec = attention_spec(block, config.d_model, str(dtype).removeprefix("torch."), documents)
        self.backend = registry.resolve("attention", block.backend, self.spec, platform)
        self.kernel = self.backend.build(self.spec, platform)
        self.rotary = block.position if block.position.type == "rotary" else None
        rotary = RotarySpec(self.spec.head_dim, self.spec.dtype)
        self.rotate, self.rotate_uncompiled = (
            registry.resolve_beside("rotary", name, rotary, platform).build(rotary, platform)
            for name in (block.backend, "triton")
        )

        d_head = self.spec.head_dim
        self.widths = [block.n_heads * d_head, block.kv_heads * d_head, block.kv_heads * d_head]
        self.wqkv = Linear(d_in or config.d_model, sum(self.widths), block.qkv_bias)
        self.wo = Linear(self.widths[0], config.d_model, block.out_bias, residual=residual)
        norm = block.norm or config.norm
        full = block.qk_norm == "full"
        self.q_norm = Norm(self.widths[0] if full else d_head, norm) if block.qk_norm != "none" else None
        self.k_norm = Norm(self.widths[1] if full else d_head, norm) if block.qk_norm != "none" else None

    @property
    def context_key(self) -> tuple:
        """Mixers with equal keys share one context."""
        return (self.backend.name, self.spec, self.rotary)

    def prepare(self, seq_len: int, device: torch.device, document_ids: Tensor | None) -> AttentionContext:
        rotary = None
        if self.rotary is not None:
            rotary = rotary_tables(torch.arange(seq_len, device=device), self.spec.head_dim, self.rotary)
        return AttentionContext(rotary, self.kernel.prepare(seq_len, device, document_ids))

    def cached_context(self, once: Callable, positions: Tensor, attend: Callable) -> AttentionContext:
        """positions: [batch, T] of the tokens being read; see models/cache.py for the others."""
        rotary, head_dim = self.rotary, self.spec.head_dim
        tables = rotary and once((rotary, head_dim), lambda: rotary_tables(positions, head_dim, rotary))
        return AttentionContext(tables, None, attend)

    def tree_context(self, tree: PrefixTree) -> AttentionContext:
        """For packed texts that begin alike."""
        from llmtrain.kernels.attention.prefix_tree_triton import prefix_tree_attention

        return self.cached_context(
            tree.cached,
            tree.positions,
            partial(prefix_tree_attention, spec=self.spec, vendor=self.platform.vendor, tree=tree),
        )

    def no_trees(self) -> str | None:
        return trees.refusal(self.spec, self.platform)

    def forward(self, x: Tensor, context: AttentionContext, adapter: nn.Module | None = None) -> Tensor:
        """adapter: adds to the fused projection's output (Zamba2's per-use adapters)."""
        qkv = self.wqkv(x)
        if adapter is not None:
            qkv = qkv + adapter(x)
        if self.block.clip_qkv is not None:
            qkv = qkv.clamp(-self.block.clip_qkv, self.block.clip_qkv)
        q, k, v = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None and self.k_norm is not None and self.block.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.spec.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.block.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        if context.rotary is not None:
            # What attends to a cache or a tree is never compiled, which makes one kernel of the reference's many.
            rotate = self.rotate if context.attend is None else self.rotate_uncompiled
            q, k = rotate(q, k, *context.rotary)
        out = self.kernel(q, k, v, context.kernel) if context.attend is None else context.attend(q, k, v)
        return self.wo(out.flatten(-2))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        kernel = Flops(attention=self.spec.flops(seq_len, causal))
        return self.wqkv.flops(seq_len) + kernel + self.wo.flops(seq_len)
