"""The `optimizer` section of the YAML: one class per optimizer, told apart by `type`. No torch here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import ByType, Problem, Section

PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
UnitInterval = Annotated[float, Field(ge=0, le=1)]
Betas = tuple[UnitInterval, UnitInterval]


def beta_problems(betas: Betas) -> Iterator[Problem]:
    for i, beta in enumerate(betas):
        if beta >= 1:
            yield Problem(f"betas.{i}", beta, "must be below 1")


class AdamWConfig(Section):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101), decoupled decay scaled by the learning rate as in torch.

    Norms, biases, A_log, D and dt_bias are never decayed.
    """

    title: ClassVar[str] = "AdamW"
    state_bytes: ClassVar[int] = 8
    """Bytes of optimizer state per parameter: two moments in fp32."""

    type: Literal["adamw"] = "adamw"
    lr: PositiveFloat
    """Peak learning rate."""
    betas: Betas = (0.9, 0.95)
    """Decay rates of the averages of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the average square."""
    weight_decay: NonNegativeFloat = 0.1
    """Per step, parameters shrink by weight_decay times the current learning rate."""
    decay_embeddings: bool = True
    """Decay embeddings too."""

    def problems(self) -> Iterator[Problem]:
        yield from beta_problems(self.betas)


OptimizerConfig = Annotated[AdamWConfig, ByType("adamw")]
"""`type` names the file of llmtrain/train/optimizers that builds it; without one, AdamW."""
