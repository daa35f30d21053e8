"""The Mamba-2 mixer (Dao & Gu, arXiv:2405.21060): project, convolve, scan, norm by a gate, project back."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.async_copy import copy_async
from llmtrain.kernels.attention.prefix_tree import PrefixTree
from llmtrain.kernels.conv1d.prefix_tree import predecessors
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.mamba_mixer.reference import compose
from llmtrain.kernels.mamba_mixer.spec import MambaMixerSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.prefix_tree import scan_schedule
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant, inverse_softplus_of_log_uniform, log_of_uniform
from llmtrain.models.layers import GatedRMSNorm, Linear, SiluGate, multiplied
from llmtrain.models.mixers.base import Mixer, MixerContext
from llmtrain.models.mixers.convolution import CachedConvolution, CausalConv1d, ConvolutionCache
from llmtrain.models.mixers.mamba2_segments import SegmentScan
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.mamba2 import Mamba2Block
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks


class SSMParameters(nn.Module):
    """The recurrence's own parameters, one per head. Apart, so that they can stay fp32 when all else is bf16.

    They are exponentiated or summed over the sequence: bf16's 8 bits of mantissa would move the decay exp(dt * A) of
    long memories by far more than one optimizer step does. Read as attributes; there is no forward.
    """

    def __init__(self, block: Mamba2Block, n_heads: int):
        super().__init__()
        self.block = block
        self.A_log = nn.Parameter(torch.empty(n_heads))
        self.D = nn.Parameter(torch.empty(n_heads))
        self.dt_bias = nn.Parameter(torch.empty(n_heads))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {
            "A_log": log_of_uniform(*self.block.a_init_range),
            "D": constant(1.0),
            "dt_bias": inverse_softplus_of_log_uniform(self.block.dt_min, self.block.dt_max),
        }


class Mamba2(Mixer):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    outputs = ("out_proj",)
    # Time constants and scales: weight decay would pull them towards a value that means something else than "small".
    fp32_parameters = no_decay_parameters = ("ssm.A_log", "ssm.D", "ssm.dt_bias")

    def __init__(
        self, block: Mamba2Block, config: ModelConfig, platform: Platform, dtype: torch.dtype, documents: bool = False
    ):
        super().__init__(block, config, platform, dtype, documents)
        dtype_name = str(dtype).removeprefix("torch.")
        self.platform, self.block = platform, block
        self.spec = spec = block.spec(config.d_model, dtype_name)
        d_inner, d_bc = block.inner_width(config.d_model), block.n_groups * block.d_state
        conv = Conv1dSpec(d_inner + 2 * d_bc, block.d_conv, dtype_name, documents)
        eps = block.gated_norm_eps or (block.norm or config.norm).eps
        gated = GatedNormSpec(d_inner, block.n_groups, eps, block.norm_before_gate, dtype_name)
        whole = MambaMixerSpec(conv, spec, gated)
        parts = [d_inner, *whole.conv_widths, spec.n_heads]  # z, x, B, C, dt
        self.in_proj = Linear(
            config.d_model, sum(parts), block.proj_bias, parts=parts, names=("z", "x", "B", "C", "dt"), whole=True
        )
        self.conv = CausalConv1d(conv, block.conv_bias, platform, block.backend)
        self.ssm = SSMParameters(block, spec.n_heads)
        self.norm = GatedRMSNorm(gated, platform, block.backend) if block.gated_norm else SiluGate()
        self.multipliers = block.projection_multipliers
        self.out_proj = Linear(d_inner, config.d_model, block.proj_bias, residual=True)
        self._choose(whole)

    def _choose(self, whole: MambaMixerSpec) -> None:
        self.whole, self.spec, platform = whole, whole.ssd, self.platform
        self.backend = registry.resolve("ssd", self.block.backend, self.spec, platform)
        self.kernel = self.backend.build(self.spec, platform)
        # What runs between the projections as one operator, where its three parts are all ours.
        self.fused: Any = None
        self.fused_segments: Any = None  # chosen by `enable_segments`
        parts = (self, self.conv, self.norm)
        if all(not isinstance(part, SiluGate) and part.backend.name == "triton" for part in parts):
            self.fused = registry.resolve("mamba_mixer", "triton", whole, platform).build(whole, platform)

    def split(self, ranks: TensorRanks) -> None:
        """Compute with this rank's heads. With fewer groups of B and C than ranks, several ranks have the same one."""
        self.ranks, spec = ranks, self.spec
        heads, groups = Part(spec.n_heads, spec.head_dim), Part(spec.n_groups, spec.d_state)
        self.in_proj.split_output(ranks, [heads, heads, groups, groups, Part(spec.n_heads)])  # z, x, B, C, dt
        self.conv.split(ranks, [heads, groups, groups])
        for name, _ in list(self.ssm.named_parameters()):
            shard_parameter(self.ssm, name, ranks.slices(0, [Part(spec.n_heads)]))
        gated = self.whole.gated_norm
        if isinstance(self.norm, GatedRMSNorm):
            self.norm.split(ranks, self.block.backend)
        self.out_proj.split_input(ranks, heads)
        (_, n_heads, _), (_, n_groups, _) = ranks.share(spec.n_heads), ranks.share(spec.n_groups)
        gated = replace(gated, dim=n_heads * spec.head_dim, n_groups=n_groups)
        self._choose(MambaMixerSpec(self.conv.spec, replace(spec, n_heads=n_heads, n_groups=n_groups), gated))

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> Mamba2Cache:
        spec, platform = self.spec, self.platform
        wide = torch.promote_types(getattr(torch, spec.dtype), torch.float32)
        state = torch.zeros(batch, spec.n_heads, spec.head_dim, spec.d_state, dtype=wide, device=device)
        step = registry.resolve("ssd_step", "auto", spec, platform).build(spec, platform)
        return Mamba2Cache.of(self.conv, batch, device, state, step)

    @property
    def context_key(self) -> Hashable:
        return self.conv.spec.width, self.spec.dt_limit

    def enable_segments(self) -> None:
        if self.fused is not None:
            from llmtrain.models.mixers.mamba2_fused_segments import segment_mixer

            self.fused_segments = partial(segment_mixer, self.fused)

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> SegmentScan:
        return SegmentScan.of(segments, seq_len, device, document_ids, self.conv.spec.width, self.spec.dt_limit)

    def prefix_refusal(self) -> str | None:
        return registry.refusal("ssd", "triton", self.spec, self.platform)

    def prefix_context(self, tree: PrefixTree) -> PrefixMamba2:
        return PrefixMamba2(self, tree)

    def forward(self, x: Tensor, context: MixerContext) -> Tensor:
        x = x if self.ranks is None else self.ranks.enter(x)
        zxbcdt, conv, ssm, y = self._project(x), self.conv, self.ssm, None
        A = -torch.exp(ssm.A_log.to(torch.promote_types(ssm.A_log.dtype, torch.float32)))
        if self.fused is not None:
            y = context.fused(self, zxbcdt, conv.weight, conv.bias, A, ssm.D, ssm.dt_bias, self.norm.weight)

        def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            return context.apply(self.kernel, x, dt, A, B, C, ssm.D, ssm.dt_bias)

        if y is None:
            y = compose(self.whole, zxbcdt, partial(context.convolve, conv), scan, self.norm)
        return self.out_proj(y)

    def _project(self, x: Tensor) -> Tensor:
        """z | x | B | C | dt, [batch, T, sum of widths], each times its factor."""
        projected = self.in_proj(x)
        if all(factor == 1 for factor in self.multipliers):
            return projected
        z, _, dt = self.whole.widths
        parts = projected.split([z, *self.whole.conv_widths, dt], dim=-1)
        return torch.cat([multiplied(part, m) for part, m in zip(parts, self.multipliers, strict=True)], dim=-1)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        scan = Flops.between_activations(Work(scan=self.spec.flops(seq_len)))
        return self.in_proj.flops(seq_len) + self.conv.flops(seq_len) + scan + self.out_proj.flops(seq_len)


@dataclass
class Mamba2Cache(ConvolutionCache):
    """The state [batch, heads, head_dim, d_state] beside the convolution's last inputs. ssd_step: the kernel of that name."""

    state: Tensor
    ssd_step: Any

    def context(self, span: Span) -> CachedMamba2:
        return CachedMamba2(self, span)


class CachedMamba2(CachedConvolution):
    """A Mamba-2 layer's context when it reads on from a cache, into it."""

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """Scan with the arguments of the ssd kernel; x: [batch, T, heads, head_dim] -> like x."""
        (x, dt, A, B, C, D, dt_bias), state = tensors, self.cache.state
        if x.shape[1] == 1:
            return self.cache.ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], D, dt_bias, state)[:, None]
        # Zeros add nothing to a state of zeros, whatever their time step: padding leaves no trace.
        y, final = kernel(self.span.without_padding(x), dt, A, B, C, D, dt_bias, state)
        state.copy_(final)
        return y


@dataclass(frozen=True)
class PrefixMamba2(MixerContext):
    """A Mamba-2 layer's context when it reads packed requests that share a prefix. Without gradients."""

    mixer: Mamba2
    tree: PrefixTree

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        from llmtrain.kernels.conv1d.prefix_tree_triton import prefix_tree_conv

        tree = self.tree
        reach = conv.spec.width - 1

        def before() -> Tensor:
            return copy_async(predecessors(tree.lengths, tree.ancestors, reach), x.device)

        return prefix_tree_conv(
            x, conv.weight, conv.bias, tree.cached(("predecessors", reach), before), self.mixer.platform.vendor
        )

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        """Scan with the arguments of the ssd kernel; x: [1, T, heads, head_dim] -> like x."""
        from llmtrain.kernels.ssd.prefix_tree_triton import launch_for, prefix_tree_scan

        x, dt, A, B, C, D, dt_bias = tensors
        mixer, tree = self.mixer, self.tree
        chunk = launch_for(mixer.spec, mixer.platform).chunk_size
        made = tree.cached(
            ("scan_schedule", chunk), lambda: scan_schedule(tree.lengths, tree.ancestors, chunk).to(x.device)
        )
        return prefix_tree_scan(x, dt, A, B, C, D, dt_bias, made, mixer.spec, mixer.platform)
