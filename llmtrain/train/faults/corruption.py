"""Comparison of ranks: the same sequences through the same weights must give the same bits on all of them."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from composer.core import Callback, State
from composer.loggers import Logger
from torch import Tensor

from llmtrain.distributed.world import World, host_name
from llmtrain.errors import RunError
from llmtrain.logs import run_log
from llmtrain.objectives.base import Batch, Outputs, without_gradient
from llmtrain.train.batches import microbatches
from llmtrain.train.step import Step, to_device

Answer = tuple[str, tuple[float, ...], tuple[float, ...]]
"""A rank's host, and the sums of its two forward passes."""


class CorruptionError(RunError):
    """A rank computes something else than the others."""


class CompareRanks(Callback):
    """Has every rank compute the forward pass of rank 0's first microbatch twice, before every so many steps, and ends the run
    where one differs by a bit: hardware that errs without a report. Backward passes and optimizers are not compared.

    Ranks that share sequences or layers are compared with those of the same place in the other groups. A single group repeats only.
    Where kernels add in no fixed order, most ranks differ from themselves: that is reported, and nothing is compared any more.
    """

    def __init__(self, step: Step, world: World, interval: int):
        self.step, self.world, self.interval = step, world, interval

    def before_train_batch(self, state: State, logger: Logger) -> None:
        number = state.timestamp.batch.value + 1
        if self.interval and number % self.interval == 0:
            assert isinstance(state.batch, Mapping)
            self._compare(state.batch, number)

    def _compare(self, batch: Batch, number: int) -> None:
        step, answers = self.step, list[Any]([None] * self.world.size)
        shared = [dict(batch)]
        dist.broadcast_object_list(shared, src=0, group=step.group)
        part = microbatches(shared[0], step.size, step.objective, step.segments, step.model.hybrid.ranks)[0]
        sums = self._sums(part), self._sums(part)
        dist.all_gather_object(answers, (host_name(), *sums), group=step.group)
        suspects = differing(answers, self.world.replication)
        if suspects is None:
            self.interval = 0
            run_log.warning(
                "WARNING: train.compare_ranks: kernels of this model add in no fixed order; ranks are not compared"
            )
        elif suspects:
            named = "; ".join(f"rank {rank} on {answers[rank][0]}: {answers[rank][1:]}" for rank in suspects)
            raise CorruptionError(
                f"ranks differ in the forward pass of the same sequences before step {number} (train.compare_ranks): {named}. "
                "Examine their GPUs (llmtrain doctor --cluster), and start again without them, from a checkpoint before"
            )

    def _sums(self, part: Mapping[str, Any]) -> tuple[float, ...]:
        """Sums over what the head reads and over the last position's logits."""
        model = self.step.model
        training = model.training
        self.step.sync.mark(False)
        model.eval()  # without dropout and jitter
        try:
            found = without_gradient(model, to_device(part, model.device), _checksum, self.step.segments)
        finally:
            model.train(training)
        return tuple(found.tolist())


def _checksum(outputs: Outputs, batch: Batch) -> Tensor:
    logits = outputs.hidden[:, -1].float() @ outputs.head.float().T
    return torch.stack([part for x in (outputs.hidden.double(), logits.double()) for part in (x.sum(), x.abs().sum())])


def differing(answers: list[Answer], replication: int) -> list[int] | None:
    """Ranks that differ from themselves or from most of those of the same place; all of them where there is no majority. None if
    half of all ranks or more differ from themselves. replication: ranks that share sequences or layers."""
    unsteady = {rank for rank, (_, first, second) in enumerate(answers) if _bits(first) != _bits(second)}
    if len(answers) > 1 and 2 * len(unsteady) >= len(answers):
        return None
    found = set(unsteady)
    for place in range(replication):
        ranks = range(place, len(answers), replication)
        [(usual, count), *_] = Counter(_bits(answers[rank][1]) for rank in ranks).most_common(1)
        others = {rank for rank in ranks if _bits(answers[rank][1]) != usual}
        found |= others if 2 * count > len(ranks) or not others else set(ranks)
    return sorted(found)


def _bits(sums: tuple[float, ...]) -> tuple[str, ...]:
    return tuple(number.hex() for number in sums)  # a NaN equals itself
