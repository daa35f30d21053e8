"""The `optimizer` section of the YAML: one class per optimizer, distinguished by `type`. No torch here."""

from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from llmtrain.config.base import (
    ByType,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    Probability,
    Problem,
    Section,
    UnitInterval,
    free,
)

Betas = tuple[UnitInterval, UnitInterval]


def beta_problems(betas: Betas) -> Iterator[Problem]:
    for i, beta in enumerate(betas):
        if beta >= 1:
            yield Problem(f"betas.{i}", beta, "must be below 1")


class ParameterGroup(Section):
    """Settings of the parameters whose names match a pattern, in place of the optimizer's own."""

    match: Annotated[str, Field(min_length=1)]
    """Pattern of names as checkpoints have them: `*.A_log`, `embed.weight`, `blocks.0.*`. `*` also stands for dots."""
    lr: Annotated[NonNegativeFloat, Field(le=10)] | None = None
    """Peak learning rate, which the schedule shapes as it does optimizer.lr; 0 leaves these parameters as they are."""
    lr_factor: Annotated[NonNegativeFloat, Field(le=1000)] | None = None
    """Peak learning rate as a multiple of optimizer.lr."""
    weight_decay: NonNegativeFloat | None = None
    """Weight decay of every parameter that matches, of norms and biases too."""

    def problems(self) -> Iterator[Problem]:
        if self.lr is not None and self.lr_factor is not None:
            yield self.problem_at("lr_factor", "stands beside lr; give one of them")
        if self.lr is None and self.lr_factor is None and self.weight_decay is None:
            yield self.problem_at("match", "is given no setting; add lr, lr_factor or weight_decay")


class OptimizerSection(Section):
    """The base of every optimizer's section, which adds its type, its own settings and the default of its weight decay.

    title: its name in `llmtrain describe`.
    """

    title: ClassVar[str]
    state_bytes: ClassVar[int]
    """Bytes of optimizer state per parameter."""
    matrix_state_bytes: ClassVar[float | None] = None
    """The same for the matrices (models/parameters.py), where it differs."""

    lr: Annotated[PositiveFloat, Field(le=10)]
    """Peak learning rate."""
    weight_decay: NonNegativeFloat = 0.1
    """Per step, parameters shrink by weight_decay times the current learning rate."""
    decay_embeddings: bool = True
    """Decay embeddings too."""
    offload: bool = free(False)
    """Keep the state in host memory, which needs state_bytes for each parameter of a rank there. A step brings it to the GPU and
    takes it back, a few parameters at a time: it costs the time of both copies over the bus, once a step."""
    groups: list[ParameterGroup] = []
    """Other settings for parameters by name: `[{match: "*.A_log", lr_factor: 0.5}, …]`. Where several entries match a parameter,
    each setting is that of the last entry which gives it."""


class AdamWConfig(OptimizerSection):
    """AdamW (Loshchilov & Hutter, arXiv:1711.05101), decoupled decay scaled by the learning rate as in torch.

    Norms, biases, A_log, D and dt_bias are not decayed, unless an entry of groups says so.
    """

    title: ClassVar[str] = "AdamW"
    state_bytes: ClassVar[int] = 8  # two moments in fp32

    type: Literal["adamw"] = "adamw"
    betas: Betas = (0.9, 0.95)
    """Decay rates of the averages of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the average square."""

    def problems(self) -> Iterator[Problem]:
        yield from beta_problems(self.betas)


class AdamW8bitConfig(OptimizerSection):
    """AdamW with both moments of the blocks' matrices in 8 bits (Dettmers et al., arXiv:2110.02861), through torchao
    (pip install 'llmtrain[float8]'): 2 bytes of state per parameter rather than 8. Blocks of 256 neighbours in a row share a scale,
    so that results do not depend on the number of ranks. Embeddings, head, norms, biases, convolutions, A_log, D and dt_bias keep
    moments in fp32. The step computes in fp32."""

    title: ClassVar[str] = "AdamW, 8 bits"
    state_bytes: ClassVar[int] = 8
    matrix_state_bytes: ClassVar[float | None] = 2 + 2 * 4 / 256  # codes, and fp32 scales of blocks

    type: Literal["adamw_8bit"]
    betas: Betas = (0.9, 0.95)
    """Decay rates of the averages of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """Added to the root of the average square."""

    def problems(self) -> Iterator[Problem]:
        yield from beta_problems(self.betas)


class MuonConfig(OptimizerSection):
    """Muon (Jordan et al., 2024) for the matrices of the blocks, AdamW for everything else: embeddings, head, norms, biases,
    convolutions, A_log, D and dt_bias. Projections that stand in one matrix (q, k and v; gate and up; z, x, B, C and dt) are
    orthogonalised one by one. The iterations run in bf16 on a GPU, in fp32 on a CPU."""

    title: ClassVar[str] = "Muon, AdamW"
    state_bytes: ClassVar[int] = 8
    matrix_state_bytes: ClassVar[float | None] = 4  # the momentum in fp32

    type: Literal["muon"]
    momentum: Probability = 0.95
    """Decay rate of the average of a matrix's gradients."""
    nesterov: bool = True
    """Take the gradient up into the momentum once more before it is orthogonalised."""
    iterations: Annotated[PositiveInt, Field(le=20)] = 5
    """Newton-Schulz iterations."""
    rms: PositiveFloat = 0.2
    """Root mean square of a matrix's update at lr 1: about that of AdamW's, so that lr and weight_decay serve both (Liu et al.,
    arXiv:2502.16982)."""
    betas: Betas = (0.9, 0.95)
    """For AdamW: decay rates of the averages of gradients and of their squares."""
    eps: PositiveFloat = 1e-8
    """For AdamW: added to the root of the average square."""

    def problems(self) -> Iterator[Problem]:
        yield from beta_problems(self.betas)


OptimizerConfig = Annotated[AdamWConfig | AdamW8bitConfig | MuonConfig, ByType("adamw")]
"""`type` names the file of llmtrain/train/optimizers that builds it; without one, AdamW."""
