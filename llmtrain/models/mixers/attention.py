"""Causal self-attention: MHA, GQA and MQA, with the options of the `attention` block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.attention import prefix_tree
from llmtrain.kernels.attention.masked import MaskedAttention
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.suffix import SuffixAttention
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant
from llmtrain.models.layers import NO_CHANGES, Change, Linear, Norm, product, rotary_tables
from llmtrain.models.mixers.attention_segments import OPERATOR, segment_attention
from llmtrain.models.mixers.base import Mixer, MixerCache
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.attention import AttentionSection
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks


@dataclass
class AttentionContext:
    """Rotary tables, and the kernel's own context; attend: takes the kernel's place where there is a cache or a prefix tree, a
    function of q, k, v and, where the layer has some, sinks.

    segments: of sequences that ranks share; `kernel` is then a list, of one context per segment.
    """

    rotary: tuple[Tensor, Tensor] | None
    kernel: Any
    attend: Callable[..., Tensor] | None = None
    segments: ContextParallelRanks | None = None


class KernelAttention(Mixer):
    """The base of mixers by an attention kernel: its choice, its contexts for whole sequences, for segments and for requests that
    share a prefix, and its costs. rope_dim: width of the rotary tables."""

    outputs = ("wo",)
    context_type: type[AttentionContext] = AttentionContext
    rope_dim: int

    def __init__(
        self,
        block: Any,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool,
        spec: AttentionSpec,
    ):
        super().__init__(block, config, platform, dtype, documents)
        self.block, self.platform, self.max_seq_len = block, platform, config.max_seq_len
        self._choose(spec)
        self.segment_backend = self.segment_kernel = None
        self.rotary = block.position if block.position.type == "rotary" else None

    def _choose(self, spec: AttentionSpec) -> None:
        self.spec, short = spec, spec.within(self.max_seq_len)
        self.backend = registry.resolve("attention", self.block.backend, short, self.platform, self.max_seq_len)
        self.kernel = self.backend.build(short, self.platform)

    def _choose_rotation(self, width: int) -> None:
        rotary = RotarySpec(width, self.spec.dtype)
        self.rotate, self.rotate_uncompiled = (
            registry.resolve_beside("rotary", name, rotary, self.platform).build(rotary, self.platform)
            for name in (self.block.backend, "triton")
        )

    def _longer_kernel(self) -> Any:
        """Kernel of sequences beyond max_seq_len, where the window begins to hide something."""
        backend = registry.resolve("attention", self.block.backend, self.spec, self.platform)
        return backend.build(self.spec, self.platform)

    @property
    def context_key(self) -> tuple:
        return (self.backend.name, self.spec, self.rotary)

    def prepare(self, seq_len: int, device: torch.device, document_ids: Tensor | None) -> AttentionContext:
        rotary, whole = self._tables(torch.arange(seq_len, device=device)), self.spec.within(self.max_seq_len)
        if whole != self.spec and whole != self.spec.within(seq_len):
            kernel = self._longer_kernel()
            context = kernel.prepare(seq_len, device, document_ids)
            return self.context_type(rotary, None, lambda q, k, v, *sinks: kernel(q, k, v, context, *sinks))
        return self.context_type(rotary, self.kernel.prepare(seq_len, device, document_ids))

    def enable_segments(self) -> None:
        spec = replace(self.spec, lower_right=True)
        self.segment_backend = registry.resolve("attention", self.block.backend, spec, self.platform, self.max_seq_len)
        self.segment_kernel = self.segment_backend.build(spec, self.platform)

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> AttentionContext:
        assert self.segment_kernel is not None
        contexts, length = [], seq_len // segments.count
        for begin in (at * length for at in segments.own):
            keys = slice(max(begin - self._reach(seq_len), 0), begin + length)
            ids = None if document_ids is None else document_ids[:, keys]
            contexts.append(self.segment_kernel.prepare(keys.stop - keys.start, device, ids, queries=length))
        return self.context_type(self._tables(segments.positions(seq_len, device)), contexts, segments=segments)

    def _reach(self, seq_len: int) -> int:
        """Tokens before a segment that it sees."""
        return seq_len if self.spec.sliding_window is None else self.spec.sliding_window - 1

    def _attend_segments(
        self,
        q: Tensor,
        kept: Tensor,
        keys_values: Callable[[Tensor], Any],
        sinks: list[Tensor],
        context: AttentionContext,
    ) -> Tensor:
        """Attention of this rank's queries to the tokens of all ranks that they see.

        kept: [batch, T, …], what ranks give each other, of which `keys_values` makes keys and values.
        """
        segments = context.segments
        assert self.segment_kernel is not None and segments is not None
        seen = segments.with_before(kept, self._reach(q.shape[1] * segments.size))
        queries = q.unflatten(1, (2, -1)).unbind(1)
        out = [
            self.segment_kernel(query, *keys_values(some), one, *sinks)
            for query, some, one in zip(queries, seen, context.kernel, strict=True)
        ]
        return torch.cat(out, dim=1)

    def prefix_refusal(self) -> str | None:
        return prefix_tree.refusal(self.spec, self.platform)

    def prefix_context(self, tree: PrefixTree) -> AttentionContext | None:
        from llmtrain.kernels.attention.prefix_tree_triton import prefix_tree_attention

        attend = partial(prefix_tree_attention, spec=self.spec, vendor=self.platform.vendor, tree=tree)
        return self.context_type(self.tables_at(tree.cached, tree.positions), None, attend)

    def _tables(self, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        return self.rotary and rotary_tables(positions, self.rope_dim, self.rotary)

    def tables_at(self, memoize: Callable, positions: Tensor) -> tuple[Tensor, Tensor] | None:
        """Rotary tables for positions [batch, T], made once for all layers that are alike (`memoize`)."""
        return self.rotary and memoize((self.rotary, self.rope_dim), lambda: self._tables(positions))

    def kernel_flops(self, seq_len: int, causal: bool) -> Flops:
        return Flops.between_activations(Work(attention=self.spec.flops(seq_len, causal)))

    def saved_ops(self) -> set[str]:
        return set((self.segment_backend or self.backend).saved_ops)

    def saved_flops(self, seq_len: int, causal: bool = False) -> Work:
        return Work(attention=self.spec.flops(seq_len, causal) if self.saved_ops() else 0)


class Attention(KernelAttention):
    """x: [batch, T, block.input_width(d_model)] -> [batch, T, d_model].

    residual: the output goes straight to the residual stream (a shared block's does not).
    """

    def __init__(
        self,
        block: AttentionSection,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
        residual: bool = True,
    ):
        spec = block.spec(config.d_model, str(dtype).removeprefix("torch."), documents)
        super().__init__(block, config, platform, dtype, documents, spec)
        self.rope_dim = spec.head_dim
        self.rotated = self.rotary.width(spec.head_dim) if self.rotary else spec.head_dim
        self._choose_rotation(self.rotated)
        d_head = self.spec.head_dim
        self.widths = [block.n_heads * d_head, block.kv_heads * d_head, block.kv_heads * d_head]
        if block.output_gate:
            self.widths.insert(1, self.widths[0])  # behind q, in whose published projection it is
        names = ("q", "q", "k", "v") if block.output_gate else ("q", "k", "v")
        d_in = block.input_width(config.d_model)
        self.wqkv = Linear(d_in, sum(self.widths), block.qkv_bias, parts=self.widths, names=names)
        self.wo = Linear(self.widths[0], config.d_model, block.out_bias, residual=residual)
        norm = block.norm or config.norm
        full = block.qk_norm == "full"
        self.sinks = nn.Parameter(torch.empty(block.n_heads)) if block.sinks else None
        self.q_norm = Norm(self.widths[0] if full else d_head, norm) if block.qk_norm != "none" else None
        self.k_norm = Norm(self.widths[-2] if full else d_head, norm) if block.qk_norm != "none" else None

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {} if self.sinks is None else {"sinks": constant(0.0)}

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's heads. With fewer heads of keys and values than ranks, several ranks have the same one."""
        self.ranks, spec = ranks, self.spec
        q, kv = self.head_parts()
        self.wqkv.split_output(ranks, [*[q] * (len(self.widths) - 2), kv, kv])
        self.wo.split_input(ranks, q)
        if self.block.qk_norm == "full" and self.q_norm is not None and self.k_norm is not None:
            self.q_norm.split(ranks, q)
            self.k_norm.split(ranks, kv)
        if self.sinks is not None:
            shard_parameter(self, "sinks", ranks.slices(0, [Part(spec.n_heads)]))
        (first, n_heads, _), (_, n_kv_heads, _) = ranks.share(spec.n_heads), ranks.share(spec.n_kv_heads)
        self.widths = [*[n_heads * spec.head_dim] * (len(self.widths) - 2), *[n_kv_heads * spec.head_dim] * 2]
        of = None if spec.alibi_max_bias is None else (first, spec.n_heads)
        self._choose(replace(spec, n_heads=n_heads, n_kv_heads=n_kv_heads, heads_of=of))

    def head_parts(self) -> tuple[Part, Part]:
        """Heads of queries, and of keys and values, as they stand in a projection."""
        return Part(self.spec.n_heads, self.spec.head_dim), Part(self.spec.n_kv_heads, self.spec.head_dim)

    def prompt_kernel(self) -> Any:
        """Kernel of prompts, which may have any length: cuDNN plans each new one anew, while requests wait."""
        spec = self.spec.within(self.max_seq_len)
        if self.backend.name == "sdpa:cudnn" and not registry.refusal("attention", "sdpa:flash", spec, self.platform):
            return registry.resolve("attention", "sdpa:flash", spec, self.platform).build(spec, self.platform)
        return self.kernel

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> AttentionCache:
        shape = (batch, self.spec.n_kv_heads, capacity, self.spec.head_dim)
        k, v = (torch.zeros(shape, dtype=getattr(torch, self.spec.dtype), device=device) for _ in "kv")
        step = registry.resolve("attention_step", "auto", self.spec, self.platform).build(self.spec, self.platform)
        return AttentionCache(self, k, v, step, MaskedAttention(self.spec, self.platform), self.prompt_kernel())

    def forward(self, x: Tensor, context: AttentionContext, changes: Mapping[str, Change] = NO_CHANGES) -> Tensor:
        """changes: to the linear layers, by name, where this is one use of a shared mixer."""
        x = x if self.ranks is None else self.ranks.enter(x)
        q, k, v, *gate = self.project(x, context, changes)
        if context.rotary is not None:
            # Attention to a cache or a prefix tree is never compiled, which would make one kernel of the reference's many.
            rotate = self.rotate if context.attend is None else self.rotate_uncompiled
            if self.rotated == self.spec.head_dim:
                q, k = rotate(q, k, *context.rotary)
            else:
                (q, q_rest), (k, k_rest) = (t.tensor_split((self.rotated,), dim=-1) for t in (q, k))
                q, k = rotate(q, k, *context.rotary)
                q, k = torch.cat((q, q_rest), dim=-1), torch.cat((k, k_rest), dim=-1)
        sinks: list[Tensor] = [] if self.sinks is None else [self.sinks]
        if context.segments is not None:
            if isinstance(self.segment_kernel, SuffixAttention):
                out = segment_attention(self.segment_kernel, context.segments, q, k, v, *sinks)
            else:
                together = torch.cat((k, v), dim=-2)  # gathered together
                out = self._attend_segments(q, together, lambda kv: kv.chunk(2, dim=-2), sinks, context)
        elif context.attend is not None:
            out = context.attend(q, k, v, *sinks)
        else:
            out = self.kernel(q, k, v, context.kernel, *sinks)
        out = out.flatten(-2)
        return product(self.wo, out * gate[0].sigmoid() if gate else out, changes.get("wo"))

    def project(
        self, x: Tensor, context: AttentionContext, changes: Mapping[str, Change] = NO_CHANGES
    ) -> tuple[Tensor, ...]:
        """Queries, keys and values by heads, before positions, [batch, T, heads, head_dim] each; then the output's gate, if any,
        [batch, T, n_heads * head_dim]."""
        qkv = product(self.wqkv, x, changes.get("wqkv"))
        if self.block.clip_qkv is not None:
            qkv = qkv.clamp(-self.block.clip_qkv, self.block.clip_qkv)
        q, *gate, k, v = qkv.split(self.widths, dim=-1)
        if self.q_norm is not None and self.k_norm is not None and self.block.qk_norm == "full":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (t.unflatten(-1, (-1, self.spec.head_dim)) for t in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None and self.block.qk_norm == "head":
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v, *gate

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.wqkv.flops(seq_len) + self.kernel_flops(seq_len, causal) + self.wo.flops(seq_len)

    def saved_ops(self) -> set[str]:
        return super().saved_ops() | ({OPERATOR} if self.overlaps_segments else set())

    @property
    def overlaps_segments(self) -> bool:
        """True if keys and values of ranks that share sequences travel beside the work on this rank's own."""
        return isinstance(self.segment_kernel, SuffixAttention)


@dataclass
class AttentionCache(MixerCache):
    """Keys and values of one attention layer, or of one use of a shared one: [batch, n_kv_heads, capacity, head_dim]."""

    slot_dims = {"k": 2, "v": 2}

    mixer: Attention
    k: Tensor
    v: Tensor
    step: Any
    masked: MaskedAttention
    kernel: Any
    """Of prompts from their first token on, where nothing but the tokens behind is hidden."""

    def context(self, span: Span) -> AttentionContext:
        rotary = self.mixer.tables_at(span.memoize, span.positions)
        return AttentionContext(rotary, None, partial(self.attend, span=span))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, *sinks: Tensor, span: Span) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k, v: [batch, T, n_kv_heads, head_dim]; sinks: [n_heads] -> like q."""
        span.keep(self.k, 2, k)
        span.keep(self.v, 2, v)
        seq_len = q.shape[1]
        if seq_len == 1:
            return self.step(q[:, 0], self.k, self.v, span.slots, span.first, *sinks, pages=span.pages)[:, None]
        spec = self.mixer.spec
        if span.start == 0:
            q, k, v = (span.to_front(t) for t in (q, k, v))
            if replace(spec, sinks=False).plain:
                context = span.memoize(self.mixer.context_key, lambda: self.kernel.prepare(seq_len, q.device))
                return span.to_back(self.kernel(q, k, v, context, *sinks))
            # Not the training kernel: FlexAttention would be compiled anew for every length of prompt.
            bias = span.memoize(spec, lambda: self.masked.bias(span.slots, span.slots))
            return span.to_back(self.masked(q, k, v, bias, *sinks))
        end = span.start + seq_len
        keys, values = self.k[:, :, :end].transpose(1, 2), self.v[:, :, :end].transpose(1, 2)
        slots = torch.arange(end, device=q.device)
        bias = span.memoize(spec, lambda: self.masked.bias(span.slots, slots, span.first))
        return self.masked(q, keys, values, bias, *sinks)
