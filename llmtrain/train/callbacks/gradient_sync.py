"""Gradient reduction of FSDP2: after every microbatch, or once a step."""

from __future__ import annotations

from composer.core import Callback, State
from composer.loggers import Logger
from torch.distributed.fsdp import FSDPModule

from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.training import Sharding
from llmtrain.train.graphs.cuda_graphs import GraphedLoss


class GradientSync(Callback):
    """Marks the last microbatch of a step for FSDP2, which Composer does not: FSDP2 would reduce, and gather again, for each.

    What is gathered at the peak of every microbatch anyway stays so until the last one: it takes no more memory. With
    `strategy: grad_op`, or where gradients are reduced once a step, that is everything, else what no layer owns. Reductions that
    a microbatch begins last, of the first layers and the embedding, go on beside the next one's forward pass.

    sharding: without `auto`. sync_every_microbatch: null decides by the sharding groups: with one rank in each, nothing is
    saved by reducing after every microbatch. graphs: while they may launch microbatches, of which all are alike to them, nothing is
    marked; they hand their gradients over after the last one.
    """

    def __init__(self, model: CausalLM, sharding: Sharding, graphs: GraphedLoss | None = None):
        assert isinstance(model, FSDPModule)
        self.model, self.graphs = model, graphs
        every_microbatch = sharding.sync_every_microbatch
        if every_microbatch is None:
            every_microbatch = next(model.parameters()).device_mesh.size(-1) > 1  # type: ignore[attr-defined]
        self.every_microbatch = every_microbatch
        self.all_stays = sharding.strategy == "grad_op" or not every_microbatch
        self._left = 0
        self._marks = True

    def batch_start(self, state: State, logger: Logger) -> None:
        assert state.device_train_microbatch_size is not None
        self._marks = self.graphs is None or not self.graphs.microbatches
        self._left = -(-len(state.batch["sample_ids"]) // int(state.device_train_microbatch_size))

    def before_forward(self, state: State, logger: Logger) -> None:
        self._left -= 1
        if not self._marks:
            return
        last = self._left == 0
        if self.every_microbatch:
            self.model.set_is_last_backward(last)
        else:
            self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last, recurse=self.all_stays)
        if isinstance(head := self.model.hybrid.head, FSDPModule):
            head.set_reshard_after_backward(last)

    def after_backward(self, state: State, logger: Logger) -> None:
        if self.graphs is not None and self._left == 0:
            self.graphs.hand_over()
