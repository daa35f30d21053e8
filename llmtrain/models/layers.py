"""The small parts of blocks: linear, norm, low-rank adapter, rotary positions.

Constructors allocate and never initialise, so a model builds on the meta device; `init_rules` gives the
parameters' initial distributions. Norms compute in fp32 whatever their input's dtype, and return that dtype.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llmtrain.kernels import registry
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.models.costs import Flops, Work
from llmtrain.models.init import InitScale, Rule, constant, normal
from llmtrain.models.sections.layers import (
    LinearScaling,
    Llama3Scaling,
    NormConfig,
    RotaryPosition,
    YarnScaling,
)
from llmtrain.models.slices import shard_parameter
from llmtrain.models.tensor_parallel import Part, TensorRanks

Output = TypeVar("Output")
Change = Callable[[Tensor, Tensor], Tensor]
"""(input, output of a linear layer) -> the output with what adapters of one use of a shared layer make of it."""
NO_CHANGES: Mapping[str, Change] = MappingProxyType({})


class Linear(nn.Linear):
    """nn.Linear that leaves its memory as it is.

    residual: the output is added to the residual stream, or to what a mixer reads of it, so its initial scale shrinks with
        depth.
    parts: widths of the projections that stand side by side in the output, which an optimizer of matrices takes one by one;
        default: one of d_out. Empty where rows are entries of a table rather than a map (the head's).
    names: of the parts, each of which may have adapters of its own; parts of one name have common ones.
    whole: adapters are those of all parts together unless a part is named.
    """

    def __init__(
        self,
        d_in: int,
        d_out: int,
        bias: bool = False,
        residual: bool = False,
        parts: Sequence[int] | None = None,
        names: Sequence[str] = (),
        whole: bool = False,
    ):
        super().__init__(d_in, d_out, bias=bias)
        self.residual = residual
        self.parts = (d_out,) if parts is None else tuple(parts)
        self.names, self.whole = tuple(names), whole or not names
        self.summing: TensorRanks | None = None
        assert sum(self.parts) in (0, d_out), (self.parts, d_out)

    def reset_parameters(self) -> None:
        """Called by nn.Linear's constructor; init_weights does it instead."""

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        rules = {"weight": normal(scale.of(self.in_features, self.residual))}
        return rules if self.bias is None else rules | {"bias": constant(0.0)}

    def split_output(self, ranks: TensorRanks, parts: Sequence[Part]) -> None:
        """Compute this rank's part of the output. Its flops stay those of all ranks."""
        for name, _ in list(self.named_parameters()):
            shard_parameter(self, name, ranks.slices(0, parts))

    def split_input(self, ranks: TensorRanks, part: Part) -> None:
        """Read this rank's part of the input, and hand on the sum over the ranks (TensorRanks.leave)."""
        self.summing = ranks
        shard_parameter(self, "weight", ranks.slices(1, [part]))

    def forward(self, input: Tensor) -> Tensor:
        if self.summing is None:
            return super().forward(input)
        y = self.summing.leave(F.linear(input, self.weight))
        return y if self.bias is None else y + self.bias

    def product(self, seq_len: int) -> Work:
        """FLOP of this layer's own product, forward."""
        return Work(projection=2 * seq_len * self.in_features * self.out_features)

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return Flops.with_weight(self.product(seq_len), self.weight.requires_grad)


class Head(Linear):
    """The map from hidden states to logits: a row for each entry of the vocabulary.

    A call hands its weight to what reads it, so that FSDP2, whose hooks live in `__call__`, gathers it then, and reduces its
    gradient beside the backward pass of the layers.
    """

    def __init__(self, d_model: int, vocab_size: int):
        super().__init__(d_model, vocab_size, parts=())

    def forward(self, hidden: Tensor, output: Callable[[Tensor, Tensor], Output]) -> Output:
        """output: (hidden states, weight [vocab_size, d_model] or this rank's part) -> what to return."""
        return output(hidden, self.matrix())

    def matrix(self) -> Tensor:
        """[vocab_size, d_model], or this rank's rows."""
        return self.weight

    def product(self, seq_len: int) -> Work:
        return Work(head=2 * seq_len * self.in_features * self.out_features)


class Embedding(nn.Module):
    """Rows of a table [n, d]. tokens: [batch, T] -> [batch, T, d]."""

    def __init__(self, n: int, d: int):
        super().__init__()
        self.n = n
        self.ranks: TensorRanks | None = None
        self.weight = nn.Parameter(torch.empty(n, d))

    def split(self, ranks: TensorRanks) -> None:
        """Keep this rank's rows. Of all tokens come this rank's own, or all (TensorRanks.leave)."""
        self.ranks = ranks
        shard_parameter(self, "weight", ranks.slices(0, [Part(self.n)]))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": normal(scale.of(self.weight.shape[1]))}

    def forward(self, tokens: Tensor) -> Tensor:
        if self.ranks is None:
            return self.look_up(tokens)
        rows = tokens - self.ranks.share(self.n)[0]
        elsewhere = (rows < 0) | (rows >= self.weight.shape[0])
        found = self.look_up(rows.masked_fill(elsewhere, 0))
        return self.ranks.leave(found.masked_fill(elsewhere[..., None], 0.0))

    def look_up(self, rows: Tensor) -> Tensor:
        """Numbers of this rank's rows [batch, T] -> [batch, T, d]."""
        return F.embedding(rows, self.weight)


class LearnedPositions(Embedding):
    """One vector per position. seq_len -> [seq_len, d], or positions [batch, T] -> [batch, T, d]."""

    def forward(self, positions: int | Tensor) -> Tensor:
        if isinstance(positions, int):
            return self.weight[:positions]
        return F.embedding(positions, self.weight)


class Norm(nn.Module):
    """LayerNorm or RMSNorm (Zhang & Sennrich, arXiv:1910.07467) over the last dimension, [..., dim].

    platform: where it will run, which picks the kernel of training, for activations of `dtype`. None: plain PyTorch, which
        the compiler fuses with what stands around it.
    """

    def __init__(
        self, dim: int, config: NormConfig, platform: Platform | None = None, dtype: torch.dtype = torch.bfloat16
    ):
        super().__init__()
        spec = config.spec(dim, str(dtype).removeprefix("torch."))
        self.plain = self.kernel = ReferenceNorm(spec)
        if platform is not None:
            self.kernel = registry.resolve("norm", config.backend, spec, platform).build(spec, platform)
        self.zero_centered = config.zero_centered
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim)) if config.bias else None

    def split(self, ranks: TensorRanks, part: Part) -> None:
        """Read this rank's part of the channels, and normalise by the statistics of all."""
        self.plain = self.kernel = SplitNorm(self.plain.spec, ranks, part)
        for name, _ in list(self.named_parameters()):
            shard_parameter(self, name, ranks.slices(0, [part]))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(0.0 if self.zero_centered else 1.0)} | (
            {} if self.bias is None else {"bias": constant(0.0)}
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.add_and_norm(x, None)[1]

    def add_and_norm(self, x: Tensor, delta: Tensor | None) -> tuple[Tensor, Tensor]:
        """x + delta (None: x), and its norm."""
        # Our kernel was measured in training steps, and in those of decoding, which CUDA graphs replay. Scoring and prompts are not
        # compiled, and bound by Python's overhead.
        kernel = self.kernel if torch.is_grad_enabled() or x.shape[-2] == 1 else self.plain
        weight = self.weight
        if self.zero_centered:  # in fp32: near 1, bf16 would not see steps below 1/256
            weight = 1 + weight.to(torch.promote_types(weight.dtype, torch.float32))
        return kernel(x, delta, weight, self.bias)


class Affine(nn.Module):
    """(x + bias) * scale, for each channel: [..., dim] -> like x."""

    def __init__(self, dim: int):
        super().__init__()
        self.scale, self.bias = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"scale": constant(1.0), "bias": constant(0.0)}

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.scale


class SplitNorm:
    """ReferenceNorm of channels that are divided between tensor-parallel ranks, `part` in all."""

    def __init__(self, spec: NormSpec, ranks: TensorRanks, part: Part):
        self.spec, self.ranks = spec, ranks
        self.copies = ranks.share(part.units)[2]

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        total = x if delta is None else x + delta
        wide = total.to(torch.promote_types(total.dtype, torch.float32))
        if self.spec.type == "layernorm":
            wide = wide - self._mean(wide)
        y = wide * torch.rsqrt(self._mean(wide.square()) + self.spec.eps) * weight
        return total, (y if bias is None else y + bias).to(total.dtype)

    def _mean(self, x: Tensor) -> Tensor:
        """Mean over all channels, [..., 1]."""
        return self.ranks.sum_over_sharers(x.sum(-1, keepdim=True), 1) / (self.copies * self.spec.dim)


class GatedRMSNorm(nn.Module):
    """Mamba-2's output norm: rms(x * silu(z)), or rms(x) * silu(z), per group of channels; in fp32.

    x, z: [..., dim] -> like x.
    """

    def __init__(self, spec: GatedNormSpec, platform: Platform, backend: str = "auto"):
        super().__init__()
        self.spec, self.platform = spec, platform
        self.backend = registry.resolve_beside("gated_norm", backend, spec, platform)
        self.kernel = self.backend.build(spec, platform)
        self.weight = nn.Parameter(torch.empty(spec.dim))

    def split(self, ranks: TensorRanks, backend: str = "auto") -> None:
        """Read this rank's part of the channels. A group of several ranks' is normalised by the statistics of all of it."""
        shard_parameter(self, "weight", ranks.slices(0, [Part(self.spec.dim)]))
        _, groups, sharers = ranks.share(self.spec.n_groups)
        spec = replace(self.spec, dim=self.spec.dim // ranks.size, n_groups=groups)
        if sharers == 1:
            self.backend = registry.resolve_beside("gated_norm", backend, spec, self.platform)
            self.kernel = self.backend.build(spec, self.platform)
        else:
            self.backend = registry.resolve("gated_norm", "reference", spec, self.platform)
            self.kernel = SplitGatedNorm(spec, ranks, self.spec.n_groups)

    def init_rules(self, scale: InitScale) -> dict[str, Rule]:
        return {"weight": constant(1.0)}

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return self.kernel(x, z, self.weight)


class SplitGatedNorm:
    """ReferenceGatedNorm of a part of one group's channels, whose others are other tensor-parallel ranks'.

    spec: of the part. groups: of all channels, fewer than ranks.
    """

    def __init__(self, spec: GatedNormSpec, ranks: TensorRanks, groups: int):
        self.spec, self.ranks, self.groups = spec, ranks, groups

    def __call__(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        spec, wide = self.spec, torch.promote_types(x.dtype, torch.float32)
        y, gate = x.to(wide), F.silu(z.to(wide))
        if not spec.norm_before_gate:
            y = y * gate
        squares = self.ranks.sum_over_sharers(y.square().sum(-1, keepdim=True), self.groups)
        width = spec.dim * self.ranks.size // self.groups
        y = y * torch.rsqrt(squares / width + spec.eps) * weight
        return (y * gate if spec.norm_before_gate else y).to(x.dtype)


class SiluGate(nn.Module):
    """x * silu(z), computed in fp32: Mamba-2's gate where no norm is beside it. x, z: [..., dim] -> like x."""

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        return (x.to(wide) * F.silu(z.to(wide))).to(x.dtype)


class LowRank(nn.Module):
    """x -> up(down(x)): a low-rank addition to another projection, without bias or scale."""

    def __init__(self, d_in: int, rank: int, d_out: int, parts: Sequence[int] | None = None):
        """parts: of the output, as Linear's."""
        super().__init__()
        self.down = Linear(d_in, rank)
        self.up = Linear(rank, d_out, parts=parts)

    def split(self, ranks: TensorRanks) -> None:
        """Compute this rank's part of each part of the output."""
        self.up.split_output(ranks, [Part(width) for width in self.up.parts])

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))

    def flops(self, seq_len: int, causal: bool = False) -> Flops:
        return self.down.flops(seq_len) + self.up.flops(seq_len)


def product(linear: Linear, x: Tensor, change: Change | None = None) -> Tensor:
    """A linear layer's output, changed."""
    y = linear(x)
    return y if change is None else change(x, y)


def multiplied(x: Tensor, factor: float) -> Tensor:
    """x * factor, without an operation for the usual factor of 1."""
    return x if factor == 1 else x * factor


def rotary_tables(positions: Tensor, head_dim: int, rotary: RotaryPosition) -> tuple[Tensor, Tensor]:
    """cos and sin of t * frequency_i (arXiv:2104.09864), times the scaling's amplitude, in fp32, for the
    n = rotary.width(head_dim) channels that are rotated.

    positions: [T] or [batch, T] -> each [T, 1, n / 2], or with batch in front.
    """
    angle = positions.to(torch.float32)[..., None, None] * rotary_frequencies(head_dim, rotary, positions.device)
    amplitude = rotary.scaling.amplitude if isinstance(rotary.scaling, YarnScaling) else 1.0
    return multiplied(angle.cos(), amplitude), multiplied(angle.sin(), amplitude)


def rotary_frequencies(head_dim: int, rotary: RotaryPosition, device: torch.device) -> Tensor:
    """Radians per token of each pair of the n rotated channels: theta^(-2 i / n), scaled. [n / 2] in fp32."""
    width = rotary.width(head_dim)
    steps = torch.arange(0, width, 2, device=device, dtype=torch.float32) / width
    frequency = 1.0 / rotary.theta**steps
    match rotary.scaling:
        case None:
            return frequency
        case LinearScaling(factor=factor):
            return frequency / factor
        case Llama3Scaling() as scaling:
            turns = scaling.original_max_seq_len * frequency / (2 * math.pi)
            low, high = scaling.low_freq_factor, scaling.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0, 1)
            return frequency * (kept + (1 - kept) / scaling.factor)
        case YarnScaling() as scaling:
            low, high = scaling.ramp(width, rotary.theta)
            lowered = ((torch.arange(width // 2, device=device) - low) / (high - low)).clamp(0, 1)
            return frequency * (1 - lowered + lowered / scaling.factor)
