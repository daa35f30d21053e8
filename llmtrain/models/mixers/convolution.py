"""The causal convolution of recurrent mixers, and its cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.platform import Platform
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, uniform
from llmtrain.models.mixers.base import MixerCache, MixerContext
from llmtrain.models.mixers.span import Span
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks


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


@dataclass
class ConvolutionCache(MixerCache):
    """The last inputs of a mixer's convolution, [batch, channels, width - 1]. A subclass adds the state of a recurrence.

    conv_step: the conv1d_step kernel.
    """

    window: Tensor
    conv_step: Any

    @classmethod
    def of(cls, conv: CausalConv1d, batch: int, device: torch.device, *state: Any) -> Self:
        """An empty one. state: of the subclass."""
        spec = conv.spec
        # Channels side by side in memory, as the step kernel likes them.
        window = torch.zeros(batch, spec.width - 1, spec.channels, dtype=getattr(torch, spec.dtype), device=device)
        step = registry.resolve("conv1d_step", "auto", spec, conv.platform).build(spec, conv.platform)
        return cls(window.transpose(1, 2), step, *state)

    def context(self, span: Span) -> CachedConvolution:
        return CachedConvolution(self, span)


@dataclass
class CachedConvolution(MixerContext):
    """A mixer's context when it reads the span's tokens on from a cache, into it."""

    cache: Any
    span: Span

    def convolve(self, conv: CausalConv1d, x: Tensor) -> Tensor:
        return conv.read_on(x, self.cache.window, self.cache.conv_step, self.span)

    def apply(self, kernel: Any, *tensors: Tensor) -> Tensor:
        raise NotImplementedError("the cache of a convolution holds no other state")
