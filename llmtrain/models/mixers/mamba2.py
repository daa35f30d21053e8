"""The Mamba-2 mixer (Dao & Gu, arXiv:2405.21060): project, convolve, scan, norm by a gate, project back."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from llmtrain.models.init import InitScale, Rule, constant, inverse_softplus_of_log_uniform, log_of_uniform, uniform
from llmtrain.models.layers import GatedRMSNorm, Linear, SiluGate, multiplied
from llmtrain.models.mixers.base import Mixer, MixerCache
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


class CausalConv1d(nn.Module):
    """Depthwise causal convolution and SiLU. x: [batch, T, channels] -> like x."""

    def __init__(self, spec: Conv1dSpec, bias: bool, platform: Platform, backend: str = "auto"):
        super().__init__()
        self.platform, self.backend_name = platform, backend
        self._choose(spec)
        self.weight = nn.Parameter(torch.empty(spec.channels, spec.width))
        self.bias = nn.Parameter(torch.empty(spec.channels)) if bias else None

    def _choose(self, spec: Conv1dSpec) -> None:
        self.spec = spec
        self.backend = registry.resolve_beside("conv1d", self.backend_name, spec, self.platform)
        self.kernel = self.backend.build(spec, self.platform)

    def split(self, ranks: TensorRanks, parts: Sequence[Part]) -> None:
        """Read this rank's part of the channels."""
        slices = ranks.slices(0, parts)
        for name, _ in list(self.named_parameters()):
            shard_parameter(self, name, slices)
        self._choose(replace(self.spec, channels=slices.length))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        # What nn.Conv1d does for a fan-in of `width`.
        bound = 1 / math.sqrt(self.spec.width)
        rule = uniform(-bound, bound)
        return {"weight": rule} | ({} if self.bias is None else {"bias": rule})

    def forward(self, x: Tensor, document_ids: Tensor | None = None) -> Tensor:
        return self.kernel(x, self.weight, self.bias, document_ids)

    def read_on(self, x: Tensor, window: Tensor, step: Any, span: Span) -> Tensor:
        """Convolve tokens behind those that `window` holds, [batch, channels, width - 1], which then holds the last of x.

        step: the conv1d_step kernel, for a single token.
        """
        if x.shape[1] == 1:
            return step(x[:, 0], window, self.weight, self.bias)[:, None]
        before = window.shape[2]
        x = torch.cat((window.transpose(1, 2), span.without_padding(x)), dim=1)
        if before:
            window.copy_(x[:, -before:].transpose(1, 2))
        return self(x)[:, before:]

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return Flops.with_weight(Work(convolution=self.spec.flops(seq_len)), self.weight.requires_grad)


class Mamba2(Mixer):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

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
        self.in_proj = Linear(config.d_model, sum(parts), block.proj_bias, parts=parts)
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
        spec, conv, platform = self.spec, self.conv.spec, self.platform
        dtype = getattr(torch, spec.dtype)
        state = torch.promote_types(dtype, torch.float32)
        return Mamba2Cache(
            self,
            # Channels side by side in memory, as the step kernel likes them.
            torch.zeros(batch, conv.width - 1, conv.channels, dtype=dtype, device=device).transpose(1, 2),
            torch.zeros(batch, spec.n_heads, spec.head_dim, spec.d_state, dtype=state, device=device),
            registry.resolve("conv1d_step", "auto", conv, platform).build(conv, platform),
            registry.resolve("ssd_step", "auto", spec, platform).build(spec, platform),
        )

    @property
    def context_key(self) -> int:
        return self.conv.spec.width

    def enable_segments(self) -> None:
        if self.fused is not None:
            from llmtrain.models.mixers.mamba2_fused_segments import segment_mixer

            self.fused_segments = partial(segment_mixer, self.fused)

    def segment_context(
        self, segments: ContextParallelRanks, seq_len: int, device: torch.device, document_ids: Tensor | None
    ) -> SegmentScan:
        return SegmentScan.of(segments, seq_len, device, document_ids, self.conv.spec.width)

    def prefix_refusal(self) -> str | None:
        return registry.refusal("ssd", "triton", self.spec, self.platform)

    def prefix_context(self, tree: PrefixTree) -> PrefixMamba2:
        return PrefixMamba2(self, tree)

    def forward(self, x: Tensor, context: CachedMamba2 | PrefixMamba2 | SegmentScan | Tensor | None = None) -> Tensor:
        """context: a cache to read on from; a prefix tree; segments of sequences that ranks share; or the document ids of a
        packed batch, [batch, T]."""
        other, ids = (None, context) if context is None or isinstance(context, Tensor) else (context, None)
        x = x if self.ranks is None else self.ranks.enter(x)
        zxbcdt, ssm = self._project(x), self.ssm
        A = -torch.exp(ssm.A_log.to(torch.promote_types(ssm.A_log.dtype, torch.float32)))

        def convolve(xBC: Tensor) -> Tensor:
            if isinstance(other, SegmentScan):
                return other.convolve(self.conv, self.conv.spec.width, xBC)
            return self.conv(xBC, ids) if other is None else other.convolve(xBC)

        def scan(x: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> Tensor:
            if isinstance(other, SegmentScan):
                return other.scan(self.kernel, self.spec, x, dt, A, B, C, ssm.D, ssm.dt_bias)
            if other is not None:
                return other.scan(x, dt, A, B, C)
            return self.kernel(x, dt, A, B, C, ssm.D, ssm.dt_bias, document_ids=ids)[0]

        def parameters() -> Any:
            return self.conv.weight, self.conv.bias, A, ssm.D, ssm.dt_bias, self.norm.weight

        if self.fused is not None and other is None:
            y = self.fused(zxbcdt, *parameters(), document_ids=ids)
        elif (
            self.fused_segments is not None
            and isinstance(other, SegmentScan)
            and other.reaches_one(zxbcdt.shape[1], self.conv.spec.width)
        ):
            y = self.fused_segments(other, zxbcdt, *parameters())
        else:
            y = compose(self.whole, zxbcdt, convolve, scan, self.norm)
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
class Mamba2Cache(MixerCache):
    """The convolution's last inputs [batch, channels, d_conv - 1] and the state [batch, heads, head_dim, d_state]."""

    mixer: Mamba2
    window: Tensor
    state: Tensor
    conv_step: Any
    ssd_step: Any

    def rows(self, rows: slice) -> Mamba2Cache:
        return replace(self, window=self.window[rows], state=self.state[rows])

    def take(self, rows: Tensor, capacity: int) -> Mamba2Cache:
        return replace(self, window=self.window[rows], state=self.state[rows])

    def context(self, span: Span) -> CachedMamba2:
        return CachedMamba2(self, span)


@dataclass
class CachedMamba2:
    """A Mamba-2 layer's context when it reads on from a cache, into it."""

    cache: Mamba2Cache
    span: Span

    def convolve(self, x: Tensor) -> Tensor:
        """x: [batch, T, channels] -> like x."""
        return self.cache.mixer.conv.read_on(x, self.cache.window, self.cache.conv_step, self.span)

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Scan with the arguments of the ssd kernel; x: [batch, T, heads, head_dim] -> like x."""
        cache, ssm = self.cache, self.cache.mixer.ssm
        if x.shape[1] == 1:
            return cache.ssd_step(x[:, 0], dt[:, 0], A, B[:, 0], C[:, 0], ssm.D, ssm.dt_bias, cache.state)[:, None]
        # Zeros add nothing to a state of zeros, whatever their time step: padding leaves no trace.
        y, final = cache.mixer.kernel(self.span.without_padding(x), dt, A, B, C, ssm.D, ssm.dt_bias, cache.state)
        cache.state.copy_(final)
        return y


@dataclass(frozen=True)
class PrefixMamba2:
    """A Mamba-2 layer's context when it reads packed requests that share a prefix. Without gradients."""

    mixer: Mamba2
    tree: PrefixTree

    def convolve(self, x: Tensor) -> Tensor:
        """x: [1, T, channels] -> like x."""
        from llmtrain.kernels.conv1d.prefix_tree_triton import prefix_tree_conv

        conv, tree = self.mixer.conv, self.tree
        reach = conv.spec.width - 1

        def before() -> Tensor:
            return copy_async(predecessors(tree.lengths, tree.ancestors, reach), x.device)

        return prefix_tree_conv(
            x, conv.weight, conv.bias, tree.cached(("predecessors", reach), before), self.mixer.platform.vendor
        )

    def scan(self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor) -> Tensor:
        """Scan with the arguments of the ssd kernel; x: [1, T, heads, head_dim] -> like x."""
        from llmtrain.kernels.ssd.prefix_tree_triton import launch_for, prefix_tree_scan

        mixer, tree = self.mixer, self.tree
        chunk = launch_for(mixer.spec, mixer.platform).chunk_size
        made = tree.cached(
            ("scan_schedule", chunk), lambda: scan_schedule(tree.lengths, tree.ancestors, chunk).to(x.device)
        )
        return prefix_tree_scan(x, dt, A, B, C, mixer.ssm.D, mixer.ssm.dt_bias, made, mixer.spec, mixer.platform)
