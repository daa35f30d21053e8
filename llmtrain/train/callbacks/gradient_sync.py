"""Gradient reduction of FSDP2: after every microbatch, or once a step."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from llmtrain.models.causal_lm import CausalLM


class GradientSync(Callback):
    """Marks the last microbatch of a step for FSDP2, which Composer does not: FSDP2 would reduce (and gather) for each.

    every_microbatch: None decides by the sharding groups: with one rank in each, nothing is saved by it.
    """

    def __init__(self, model: CausalLM, every_microbatch: bool | None):
        assert isinstance(model, FSDPModule)
        self.model = model
        if every_microbatch is None:
            every_microbatch = next(model.parameters()).device_mesh.size(-1) > 1  # type: ignore[attr-defined]
        self.every_microbatch = every_microbatch
        self._left = 0

    def batch_start(self, state: State, logger: Logger) -> None:
        assert state.device_train_microbatch_size is not None
        self._left = -(-len(state.batch["sample_ids"]) // int(state.device_train_microbatch_size))

    def before_forward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        if self.every_microbatch:
            return
        last = self._left == 0
        self.model.set_requires_gradient_sync(last)
        # Without a reduction there is no reason to drop the weights that the next microbatch needs at once.
        self.model.set_reshard_after_backward(last)
