"""The Gated DeltaNet mixer (Yang et al., arXiv:2412.06464): project, convolve, normalise q and k, apply the gated delta rule,
norm each head by a gate, project back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.gated_delta.step import gated_delta_step
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, inverse_softplus_of_log_uniform, log_of_uniform
from llmtrain.models.layers import GatedRMSNorm, Linear
from llmtrain.models.mixers.base import Mixer, MixerContext
from llmtrain.models.mixers.convolution import CachedConvolution, CausalConv1d, ConvolutionCache
from llmtrain.models.mixers.gated_deltanet_segments import SegmentRule, with_transition
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.gated_deltanet import DeltaRuleBlock, GatedDeltaNetBlock
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks

_QK_EPS = 1e-6
"""Added to the squared length of queries and keys."""


class DecayParameters(nn.Module):
    """Parameters of the decay, one per head: log alpha = -exp(A_log) softplus(a + dt_bias). Apart, so that they can stay fp32
    when all else is bf16 (see Mamba-2's SSMParameters). Read as attributes; there is no forward.

    channels: of a head that have a dt_bias of their own.
    """

    def __init__(self, block: DeltaRuleBlock, channels: int = 1):
        super().__init__()
        self.block, self.channels = block, channels
        self.A_log = nn.Parameter(torch.empty(block.n_heads))
        self.dt_bias = nn.Parameter(torch.empty(block.n_heads * channels))

    def split(self, ranks: TensorRanks) -> None:
        """Keep this rank's heads."""
        for name, width in (("A_log", 1), ("dt_bias", self.channels)):
            shard_parameter(self, name, ranks.slices(0, [Part(self.block.n_heads, width)]))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {
            "A_log": log_of_uniform(*self.block.a_init_range),
            "dt_bias": inverse_softplus_of_log_uniform(self.block.dt_min, self.block.dt_max),
        }


class HeadGatedRMSNorm(GatedRMSNorm):
    """rms(x) * silu(z) of each head, with one weight for all heads. x, z: [..., heads * head_dim] -> like x."""

    def __init__(self, spec: GatedNormSpec, platform: Platform):
        super().__init__(spec, platform)
        self.n_heads = spec.n_groups
        self.weight = nn.Parameter(torch.empty(spec.group_size))

    def split(self, ranks: TensorRanks, backend: str = "auto") -> None:
        """Read this rank's heads; each has the whole weight."""
        self.n_heads = ranks.share(self.spec.n_groups)[1]
        self.spec = replace(self.spec, dim=self.n_heads * self.spec.group_size, n_groups=self.n_heads)
        self.backend = registry.resolve_beside("gated_norm", backend, self.spec, self.platform)
        self.kernel = self.backend.build(self.spec, self.platform)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.kernel(x, z, self.weight.repeat(self.n_heads))


class DeltaRule(Mixer):
    """The base of mixers with a delta rule: its kernel for whole sequences and for segments, its cache and its costs.

    A subclass makes in_proj, conv, decay, norm and out_proj, and has `forward`.
    """

    outputs = ("out_proj",)
    # As Mamba-2's: weight decay would pull them towards a value that means something else than "small".
    fp32_parameters = no_decay_parameters = ("decay.A_log", "decay.dt_bias")
    operation: registry.Operation
    conv: CausalConv1d
    decay: DecayParameters
    norm: HeadGatedRMSNorm
    out_proj: Linear

    def __init__(
        self,
        block: DeltaRuleBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        dtype_name = str(dtype).removeprefix("torch.")
        self.platform, self.block = platform, block
        self.operation, spec, self.backend_name = block.kernel(config.d_model, dtype_name, documents)
        self._choose(spec)
        self.segment_backend: registry.Backend | None = None
        self.segment_kernel: Any = None
        keys, values = block.widths()
        self.conv_widths = [keys, keys, values]
        self.eps = block.gated_norm_eps or (block.norm or config.norm).eps
        self.conv_spec = Conv1dSpec(2 * keys + values, block.d_conv, dtype_name, documents)

    def _choose(self, spec: GatedDeltaSpec) -> None:
        self.spec = spec
        self.backend = registry.resolve(self.operation, self.backend_name, spec, self.platform)
        self.kernel = self.backend.build(spec, self.platform)

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's heads. With fewer heads of queries and keys than ranks, several ranks have the same one."""
        self.ranks, spec = ranks, self.spec
        keys, values = Part(spec.n_key_heads, spec.key_head_dim), Part(spec.n_heads, spec.value_head_dim)
        self.conv.split(ranks, [keys, keys, values])
        self.decay.split(ranks)
        self.norm.split(ranks)
        self.out_proj.split_input(ranks, values)
        (_, n_heads, _), (_, n_key_heads, _) = ranks.share(spec.n_heads), ranks.share(spec.n_key_heads)
        self._choose(replace(spec, n_heads=n_heads, n_key_heads=n_key_heads))
        of_keys, of_values = n_key_heads * spec.key_head_dim, n_heads * spec.value_head_dim
        self.conv_widths = [of_keys, of_keys, of_values]

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> GatedDeltaNetCache:
        spec, wide = self.spec, torch.promote_types(getattr(torch, self.spec.dtype), torch.float32)
        shape = (batch, spec.n_heads, spec.key_head_dim, spec.value_head_dim)
        return GatedDeltaNetCache.of(self.conv, batch, device, torch.zeros(shape, dtype=wide, device=device))

    @property
    def context_key(self) -> Hashable:
        return self.conv.spec.width, self.spec

    def enable_segments(self) -> None:
        """A second kernel: each segment is a sequence of its own, with values beside which its transition is computed."""
        spec = with_transition(self.spec)
        self.segment_backend = registry.resolve(self.operation, self.backend_name, spec, self.platform)
        self.segment_kernel = self.segment_backend.build(spec, self.platform)

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> SegmentRule:
        return SegmentRule.of(segments, seq_len, device, document_ids, self.conv.spec.width, self.segment_kernel)

    def heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q and k of unit length (q times key_head_dim^-1/2) and v, by heads: what the rule reads of the convolution's output."""
        q, k, v = qkv.split(self.conv_widths, dim=-1)
        q, k = (t.unflatten(-1, (-1, self.spec.key_head_dim)) for t in (q, k))
        q, k = _unit_length(q, self.spec.key_head_dim**-0.5), _unit_length(k)
        return q, k, v.unflatten(-1, (-1, self.spec.value_head_dim))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        """Count the rule alone: what segments compute beside it is the price of sharing sequences, and no work of the model's."""
        rule = Flops.between_activations(Work(scan=self.spec.flops(seq_len)))
        return sum((linear.flops(seq_len) for linear, *_ in self.products()), self.conv.flops(seq_len) + rule)

    def saved_ops(self) -> set[str]:
        backend = self.backend if self.segment_backend is None else self.segment_backend
        return set(backend.saved_ops)

    def saved_flops(self, seq_len: int, causal: bool = False) -> Work:
        return Work(scan=self.spec.flops(seq_len) if self.saved_ops() else 0)


class GatedDeltaNet(DeltaRule):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    def __init__(
        self,
        block: GatedDeltaNetBlock,
        config: ModelConfig,
        platform: Platform,
        dtype: torch.dtype,
        documents: bool = False,
    ):
        super().__init__(block, config, platform, dtype, documents)
        self.beta_scale = 2 if block.negative_eigenvalues else 1
        values, heads = block.widths()[1], block.n_heads
        parts = [*self.conv_widths, values, heads, heads]
        self.widths = [self.conv_spec.channels, values, heads, heads]
        self.in_proj = Linear(config.d_model, sum(parts), parts=parts, names=("q", "k", "v", "z", "b", "a"))
        self.conv = CausalConv1d(self.conv_spec, bias=False, platform=platform)
        self.decay = DecayParameters(block)
        self.norm = HeadGatedRMSNorm(GatedNormSpec(values, heads, self.eps, True, self.spec.dtype), platform)
        self.out_proj = Linear(values, config.d_model, residual=True)

    def split(self, ranks: TensorRanks) -> None:
        spec = self.spec
        keys, values = Part(spec.n_key_heads, spec.key_head_dim), Part(spec.n_heads, spec.value_head_dim)
        heads = Part(spec.n_heads)
        self.in_proj.split_output(ranks, [keys, keys, values, values, heads, heads])  # q, k, v, z, b, a
        super().split(ranks)
        self.widths = [sum(self.conv_widths), self.conv_widths[2], self.spec.n_heads, self.spec.n_heads]

    def forward(self, x: Tensor, context: MixerContext) -> Tensor:
        x = x if self.ranks is None else self.ranks.enter(x)
        qkv, z, b, a = self.in_proj(x).split(self.widths, dim=-1)
        q, k, v = self.heads(context.convolve(self.conv, qkv))
        wide = torch.promote_types(x.dtype, torch.float32)
        beta = self.beta_scale * b.to(wide).sigmoid()
        A_log, dt_bias = self.decay.A_log.to(wide), self.decay.dt_bias.to(wide)
        log_decay = -A_log.exp() * F.softplus(a.to(wide) + dt_bias)
        y = context.apply(self.kernel, q, k, v, log_decay, beta)
        return self.out_proj(self.norm(y.flatten(-2), z))


def _unit_length(t: Tensor, scale: float = 1.0) -> Tensor:
    """t / |t| * scale over the last dimension, computed in fp32 or wider; zeros stay zeros."""
    wide = t.to(torch.promote_types(t.dtype, torch.float32))
    return (wide * (torch.rsqrt(wide.square().sum(-1, keepdim=True) + _QK_EPS) * scale)).to(t.dtype)


@dataclass
class GatedDeltaNetCache(ConvolutionCache):
    """The state [batch, heads, key_head_dim, value_head_dim] beside the convolution's last inputs."""

    state: Tensor

    def context(self, span: Span) -> CachedGatedDeltaNet:
        return CachedGatedDeltaNet(self, span)


class CachedGatedDeltaNet(CachedConvolution):
    """A Gated DeltaNet layer's context when it reads on from a cache, into it."""

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """The arguments of the gated_delta kernel -> y, [batch, T, heads, value_head_dim]."""
        (q, k, v, log_decay, beta), state = tensors, self.cache.state
        if v.shape[1] == 1:
            return gated_delta_step(*(t[:, 0] for t in tensors), state=state)[:, None]
        # Values of zero leave a state of zeros as it is: padding leaves no trace.
        y, final = kernel(q, k, self.span.without_padding(v), log_decay, beta, state)
        state.copy_(final)
        return y
