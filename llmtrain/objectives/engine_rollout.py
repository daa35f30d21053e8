"""The section of answers that the model draws in the run that trains it. No torch here."""

from typing import Literal

from llmtrain.config.base import NonNegativeFloat, PositiveInt, Section, free


class EngineRollout(Section):
    """Answers by the model that is trained, in the run."""

    type: Literal["engine"] = "engine"
    rows: PositiveInt = free(64)
    """Answers that a rank draws at a time; memory for their keys, values and states is taken at the start."""
    prefix_mb: NonNegativeFloat = free(64.0)
    """Megabytes for the states behind prompts: the answers of a group then read their prompt once. 0: none."""
    weights: Literal["auto", "copied", "gathered"] = free("auto")
    """Weights that draw answers. copied: a copy in the format of the computation, whole on each rank, which stays in memory and is
    brought up to date before each rollout; on a GPU each token is then a recorded CUDA graph. gathered: the trainer's own, which
    FSDP2 gathers for a rollout, without graphs. auto: copied where memory allows it."""
