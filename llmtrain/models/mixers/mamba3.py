"""The Mamba-3 mixer with one input and output per head (SISO): project, norm and shift B and C, scan, gate, project back."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.mamba3.reference import State
from llmtrain.kernels.platform import Platform
from llmtrain.models.config import ModelConfig
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant, inverse_softplus_of_log_uniform
from llmtrain.models.layers import Linear, Norm, SiluGate
from llmtrain.models.mixers.base import Mixer, MixerCache, MixerContext
from llmtrain.models.mixers.span import Span
from llmtrain.models.sections.layers import NormConfig
from llmtrain.models.sections.mamba3 import Mamba3Block


class Mamba3Parameters(nn.Module):
    """The recurrence's own parameters: dt_bias and D of each head, and what is added to B and C, [heads * d_state]. Apart, so that
    they can stay fp32 when all else is bf16. Read as attributes; there is no forward."""

    def __init__(self, block: Mamba3Block, n_heads: int):
        super().__init__()
        self.block = block
        self.dt_bias = nn.Parameter(torch.empty(n_heads))
        self.D = nn.Parameter(torch.empty(n_heads))
        self.B_bias = nn.Parameter(torch.empty(n_heads * block.d_state))
        self.C_bias = nn.Parameter(torch.empty(n_heads * block.d_state))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        ones = dict.fromkeys(("D", "B_bias", "C_bias"), constant(1.0))
        return {"dt_bias": inverse_softplus_of_log_uniform(self.block.dt_min, self.block.dt_max), **ones}


class Mamba3(Mixer):
    """x: [batch, T, d_model] -> [batch, T, d_model]."""

    outputs = ("out_proj",)
    # Time constants and scales, as Mamba-2's.
    fp32_parameters = no_decay_parameters = ("ssm.dt_bias", "ssm.D", "ssm.B_bias", "ssm.C_bias")

    def __init__(
        self, block: Mamba3Block, config: ModelConfig, platform: Platform, dtype: torch.dtype, documents: bool = False
    ):
        super().__init__(block, config, platform, dtype, documents)
        self.block, self.dtype, self.n_heads = block, dtype, block.n_heads(config.d_model)
        self.widths, inner = block.widths(config.d_model), block.expand * config.d_model
        names = ("z", "x", "B", "C", "dt", "A", "trap", "angle")
        self.in_proj = Linear(config.d_model, sum(self.widths), parts=self.widths, names=names)
        norm = NormConfig(type="rmsnorm", eps=1e-5)
        self.B_norm, self.C_norm = Norm(block.d_state, norm), Norm(block.d_state, norm)
        self.ssm = Mamba3Parameters(block, self.n_heads)
        self.spec, self.platform = block.spec(config.d_model, str(dtype).removeprefix("torch.")), platform
        self.backend = registry.resolve("mamba3", block.backend, self.spec, platform)
        self.kernel, self.gate = self.backend.build(self.spec, platform), SiluGate()
        self.out_proj = Linear(inner, config.d_model, residual=True)

    def empty_cache(self, batch: int, capacity: int, device: torch.device) -> Mamba3Cache:
        block, wide = self.block, torch.promote_types(self.dtype, torch.float32)
        shapes = ((block.head_dim, block.d_state), (block.angles,), (block.d_state,), (block.head_dim,))
        tensors = (torch.zeros(batch, self.n_heads, *shape, dtype=wide, device=device) for shape in shapes)
        step = registry.resolve("mamba3_step", "auto", self.spec, self.platform).build(self.spec, self.platform)
        return Mamba3Cache(*tensors, step=step)

    def forward(self, x: Tensor, context: MixerContext) -> Tensor:
        z, x, B, C, dt, a, trap, angle = self.in_proj(x).split(self.widths, dim=-1)
        ssm, wide = self.ssm, torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + ssm.dt_bias.to(wide))
        log_decay = (-F.softplus(a.to(wide))).clamp(max=-self.block.a_floor) * dt
        v = x.unflatten(-1, (self.n_heads, -1))
        q, k = (norm(t.unflatten(-1, (self.block.n_groups, -1))) for norm, t in ((self.C_norm, C), (self.B_norm, B)))
        biases = (bias.view(self.n_heads, -1) for bias in (ssm.C_bias, ssm.B_bias))
        gates = (log_decay, dt, trap.to(wide).sigmoid(), math.pi * angle.to(wide).tanh())
        y = context.apply(self.kernel, q, k, v, *gates, *biases, ssm.D)
        return self.out_proj(self.gate(y.flatten(-2), z))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        scan = Flops.between_activations(Work(scan=self.spec.flops(seq_len)))
        return self.in_proj.flops(seq_len) + scan + self.out_proj.flops(seq_len)


@dataclass
class Mamba3Cache(MixerCache):
    """The tensors of State. step: the kernel mamba3_step."""

    h: Tensor
    angle: Tensor
    k: Tensor
    v: Tensor
    step: Any

    def context(self, span: Span) -> CachedMamba3:
        return CachedMamba3(self, span)


@dataclass
class CachedMamba3(MixerContext):
    """A Mamba-3 layer's context when it reads on from a cache, into it."""

    cache: Mamba3Cache
    span: Span

    def convolve(self, conv: Any, x: Tensor) -> Tensor:
        raise NotImplementedError("Mamba-3 has no convolution")

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        q, k, v, *rest = tensors
        cache = self.cache
        state = State(cache.h, cache.angle, cache.k, cache.v)
        if v.shape[1] == 1:
            gates, parameters = (t[:, 0] for t in rest[:4]), rest[4:]
            return cache.step(q[:, 0], k[:, 0], v[:, 0], *gates, *parameters, state)[:, None]
        # Values of zero write nothing, and where angles begin does not matter: padding leaves no trace.
        y, last = kernel(q, k, self.span.without_padding(v), *rest, state)
        for kept, new in zip(state, last, strict=True):
            kept.copy_(new)
        return y
