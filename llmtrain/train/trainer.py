"""Composer's trainer, with a host that stays ahead of the GPU between steps."""

import datetime
import itertools
from collections.abc import Iterator
from typing import Any, Self

import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import Engine, Event, TrainerMode

from llmtrain.errors import Preempted
from llmtrain.models.loss import LossOutput
from llmtrain.objectives.base import Batch
from llmtrain.train.step import Step, summed


class StepTrainer(Trainer):
    """Waits for the GPU once a step: where Stability asks whether the step may be taken.

    Composer also waits for the optimizer, to read losses, and then for messages about the numbers of tokens and of samples, while
    the GPU has nothing to do. Here losses are read with Stability's figures, before the optimizer is launched, and ranks exchange
    numbers in host memory; what comes between two steps, and the launches of the next one, run beside the optimizer's kernels.

    Losses are logged as Composer does: means over ranks of each rank's part; names with a /, rewards/chosen, as they are. Every
    rank must have one. step: forward and backward passes, in place of Composer's.
    """

    def __init__(self, step: Step, **settings: Any):
        super().__init__(**settings)
        self._step = step

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close what is open. After an error without Composer's barrier: the others may wait for this rank in a collective, or for
        its stage, until it ends."""
        if kind is None or issubclass(kind, Preempted):
            self.close()
        else:
            self.engine.close()

    @property
    def engine(self) -> Engine:
        """Composer's, without the passes that order algorithms: there are none, and the passes import what any could need,
        half of transformers and torchao among it."""
        return self._engine

    @engine.setter
    def engine(self, engine: Engine) -> None:
        engine.algorithm_passes = []
        self._engine = engine

    def _train_batch(self, use_grad_scaling: bool) -> Any:
        """Take a step. Returns None, for Composer would wait for losses: they are logged, and set for callbacks, here."""
        state, ranks = self.state, dist.get_world_size()
        [optimizer] = state.optimizers
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        optimizer.zero_grad(set_to_none=True)
        batch = state.batch
        result = self._step.forward_backward(batch, self._observe)
        found = result.losses
        state.batch = batch
        sums = torch.stack(list(found.values()))
        if ranks > 1:
            dist.all_reduce(sums)
        sums = sums.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if torch.cuda.is_available() else None
        if arrived is not None:
            arrived.record()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        if arrived is not None:
            arrived.synchronize()
        optimizer.step()
        state.total_loss_dict = {
            name if "/" in name else f"loss/train/{name}": total / ranks
            for name, total in zip(found, sums.tolist(), strict=True)
        }
        self.first_train_batch_complete = True
        self.logger.log_metrics({"trainer/device_train_microbatch_size": self._step.size})
        self.logger.log_metrics(state.total_loss_dict | result.metrics)
        if ranks > 1:
            arrivals = self._step.arrivals
            self.logger.log_metrics({"ranks/last": arrivals.last, "ranks/lag_seconds": arrivals.lag})
        if name := self._step.objective.count_name:
            self.logger.log_metrics({name: result.count})

    def _observe(self, moment: str, batch: Batch, output: LossOutput | None) -> None:
        """Composer's event of this name, with the microbatch and its losses in the state."""
        state: Any = self.state
        state.batch, state.outputs = batch, output
        state.loss = None if output is None else {"total": output.loss}
        self.engine.run_event(Event(moment))

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        """Batches. Every rank has as many for training, so that none has to tell the others when they end."""
        if trainer_mode != TrainerMode.TRAIN:
            yield from super()._iter_dataloader(trainer_mode)
            return
        assert self.state.dataloader is not None
        length = self.state.dataloader_len
        batches = itertools.islice(self.state.dataloader, None if length is None else int(length))
        if self._step.rollouts is not None:
            batches = self._step.rollouts.ahead(batches)
        while True:
            self.engine.run_event(Event.BEFORE_DATALOADER)
            batch = next(batches, None)
            if batch is None:
                self.engine.run_marker_only_event(Event.AFTER_DATALOADER)
                return
            yield batch

    def _accumulate_time_across_ranks(
        self, num_samples: int | float, num_tokens: int, batch_time: datetime.timedelta
    ) -> tuple[int, int, datetime.timedelta]:
        """Samples and tokens of all ranks. The time is this rank's: no run of ours lasts for a time."""
        samples, tokens = summed(self._step.group, int(num_samples), num_tokens)
        return samples, tokens, batch_time
