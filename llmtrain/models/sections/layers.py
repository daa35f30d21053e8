"""The sections of the small parts of blocks: norms, positions inside attention. No torch here."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import PositiveFloat, PositiveInt, Problem, Section, free
from llmtrain.kernels.norm.spec import NormSpec

NormBackend = Literal["auto", "reference", "triton"]


class NormConfig(Section):
    """A normalisation layer over the last dimension."""

    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    bias: bool = False
    """LayerNorm's additive bias. RMSNorm has none."""
    eps: PositiveFloat = 1e-5
    zero_centered: bool = False
    """Store the weight as its distance from 1, as Gemma does, so that weight decay would draw it to 1."""
    place: Literal["before", "after", "both"] = "before"
    """Of a block's norms: at the input of mixer and MLP, at their output (OLMo 2), or at both (Gemma 2)."""
    backend: NormBackend = free("auto")
    """In training steps. Validation, scoring and generation, and norms of queries and keys, are plain PyTorch. What is named
    must be able to serve wherever the model trains.
    """

    @property
    def function(self) -> NormConfig:
        """The same norm with the default backend: what it computes."""
        return self.model_copy(update={"backend": "auto"})

    def problems(self) -> Iterator[Problem]:
        if self.type == "rmsnorm" and self.bias:
            yield self.problem_at("bias", "RMSNorm has no bias; set bias: false or type: layernorm")

    def spec(self, dim: int, dtype: str = "bfloat16") -> NormSpec:
        """The kernel's view of a norm over `dim` channels."""
        return NormSpec(dim, self.type, self.bias, self.eps, dtype)


class NoPosition(Section):
    """No position information inside attention (learned embeddings may still add it at the input)."""

    type: Literal["none"] = "none"


class AlibiPosition(Section):
    """Attention with linear biases (Press et al., arXiv:2108.12409)."""

    type: Literal["alibi"]
    max_bias: PositiveFloat = 8.0
    """Slopes are 2^(-max_bias * i / n_heads)."""


class LinearScaling(Section):
    """Positions divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595)."""

    type: Literal["linear"]
    factor: PositiveFloat


class Llama3Scaling(Section):
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp in between (arXiv:2407.21783).

    A frequency's turns within original_max_seq_len tell which it is: fewer than low_freq_factor, or more than
    high_freq_factor.
    """

    type: Literal["llama3"]
    factor: PositiveFloat
    low_freq_factor: PositiveFloat = 1.0
    high_freq_factor: PositiveFloat = 4.0
    original_max_seq_len: PositiveInt = 8192
    """Longest sequence before the extension."""

    def problems(self) -> Iterator[Problem]:
        if self.low_freq_factor >= self.high_freq_factor:
            yield self.problem_at("low_freq_factor", f"must be below high_freq_factor ({self.high_freq_factor})")


class YarnScaling(Section):
    """YaRN (Peng et al., arXiv:2309.00071): pairs of channels with few turns get 1/factor of their frequency, those with many
    keep it, a ramp over the pairs lies between, and scores grow sharper.

    A pair's turns are those within original_max_seq_len: the ramp goes from the pair with beta_fast turns to that with
    beta_slow.
    """

    type: Literal["yarn"]
    factor: PositiveFloat
    original_max_seq_len: PositiveInt
    """Longest sequence before the extension."""
    beta_fast: PositiveFloat = 32.0
    beta_slow: PositiveFloat = 1.0
    truncate: bool = True
    """The ramp begins and ends at whole pairs."""
    attention_factor: PositiveFloat | None = None
    """Factor of rotated queries and keys. Default: 0.1 ln(factor) + 1."""

    def problems(self) -> Iterator[Problem]:
        if self.beta_slow > self.beta_fast:
            yield self.problem_at("beta_slow", f"must not exceed beta_fast ({self.beta_fast})")

    @property
    def amplitude(self) -> float:
        """Factor of rotated queries and keys."""
        return self.attention_factor or 0.1 * math.log(max(self.factor, 1.0)) + 1.0

    def ramp(self, width: int, theta: float) -> tuple[float, float]:
        """The pairs, counted from 0 and perhaps between two, where the ramp begins and ends; width: rotated channels."""

        def pair(turns: float) -> float:
            return width * math.log(self.original_max_seq_len / (turns * 2 * math.pi)) / (2 * math.log(theta))

        low, high = pair(self.beta_fast), pair(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, width - 1)
        return low, high + 0.001 if low == high else high


RotaryScaling = Annotated[LinearScaling | Llama3Scaling | YarnScaling, Field(discriminator="type")]


class RotaryPosition(Section):
    """Rotary embeddings (Su et al., arXiv:2104.09864), rotating the two halves of each head, or of its first channels."""

    type: Literal["rotary"]
    theta: Annotated[float, Field(ge=1, le=1e12)] = 10_000.0
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Share of a head's channels that is rotated: the first int(fraction * head_dim)."""
    scaling: RotaryScaling | None = None
    """Frequencies lowered for contexts longer than those of the first training."""

    def problems(self) -> Iterator[Problem]:
        if self.theta == 1 and self.scaling is not None and self.scaling.type == "yarn":
            yield self.problem_at("theta", "YaRN needs pairs that turn at different frequencies; give theta above 1")

    def width(self, head_dim: int) -> int:
        """Channels of each head that are rotated."""
        return int(self.fraction * head_dim)


Position = Annotated[NoPosition | AlibiPosition | RotaryPosition, Field(discriminator="type")]
