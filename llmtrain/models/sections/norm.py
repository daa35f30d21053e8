"""The section of a normalisation layer. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Problem, Section, free
from llmtrain.kernels.norm.spec import NormSpec

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
