"""The sections of the small parts of blocks: norms, feed-forward layers, positions inside attention. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import PositiveInt, Problem, Section, free
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.models.costs import SavedBytes

NormBackend = Literal["auto", "reference", "triton"]


class NormConfig(Section):
    """A normalisation layer over the last dimension."""

    type: Literal["layernorm", "rmsnorm"] = "rmsnorm"
    bias: bool = False
    """LayerNorm's additive bias. RMSNorm has none."""
    eps: Annotated[float, Field(gt=0)] = 1e-5
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
            yield Problem("bias", True, "RMSNorm has no bias; set bias: false or type: layernorm")

    def spec(self, dim: int, dtype: str = "bfloat16") -> NormSpec:
        """The kernel's view of a norm over `dim` channels."""
        return NormSpec(dim, self.type, self.bias, self.eps, dtype)


class MLPConfig(Section):
    """Feed-forward layer: `gelu` has two matrices, `swiglu` and `geglu` three."""

    type: Literal["gelu", "swiglu", "geglu"] = "swiglu"
    d_ff: PositiveInt
    """Hidden width."""
    bias: bool = False

    def saved_bytes(self, d_model: int, width: int) -> SavedBytes:
        """See BlockSection.saved_bytes."""
        up = self.d_ff if self.type == "gelu" else 2 * self.d_ff
        # Input and output of the norm, the first projection's output, and the second's input.
        return SavedBytes(width * (2 * d_model + up + self.d_ff), width * up)


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
