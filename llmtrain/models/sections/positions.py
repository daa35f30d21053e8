"""The sections of position information inside attention. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import PositiveInt, Problem, Section


class NoPosition(Section):
    """No position information inside attention (learned embeddings may still add it at the input)."""

    type: Literal["none"] = "none"


class AlibiPosition(Section):
    """Attention with linear biases (Press et al., arXiv:2108.12409)."""

    type: Literal["alibi"]
    max_bias: Annotated[float, Field(gt=0)] = 8.0
    """Slopes are 2^(-max_bias * i / n_heads)."""


class LinearScaling(Section):
    """Positions divided by `factor` (position interpolation, Chen et al., arXiv:2306.15595)."""

    type: Literal["linear"]
    factor: Annotated[float, Field(gt=0)]


class Llama3Scaling(Section):
    """Llama 3.1's: low frequencies divided by `factor`, high ones kept, a ramp in between (arXiv:2407.21783).

    A frequency's turns within original_max_seq_len tell which it is: fewer than low_freq_factor, or more than
    high_freq_factor.
    """

    type: Literal["llama3"]
    factor: Annotated[float, Field(gt=0)]
    low_freq_factor: Annotated[float, Field(gt=0)] = 1.0
    high_freq_factor: Annotated[float, Field(gt=0)] = 4.0
    original_max_seq_len: PositiveInt = 8192
    """Longest sequence before the extension."""

    def problems(self) -> Iterator[Problem]:
        if self.low_freq_factor >= self.high_freq_factor:
            yield Problem(
                "low_freq_factor", self.low_freq_factor, f"must be below high_freq_factor ({self.high_freq_factor})"
            )


RotaryScaling = Annotated[LinearScaling | Llama3Scaling, Field(discriminator="type")]


class RotaryPosition(Section):
    """Rotary embeddings (Su et al., arXiv:2104.09864), rotating the two halves of each head."""

    type: Literal["rotary"]
    theta: Annotated[float, Field(gt=0)] = 10_000.0
    scaling: RotaryScaling | None = None
    """Frequencies lowered for contexts longer than those of the first training."""


Position = Annotated[NoPosition | AlibiPosition | RotaryPosition, Field(discriminator="type")]
