"""Composer's trainer, with a host that stays ahead of the GPU between steps."""

from __future__ import annotations

import datetime
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from composer import Trainer
from composer.core import Event, TrainerMode
from torch import Tensor


class StepTrainer(Trainer):
    """Waits for the GPU once a step: where Stability asks whether the step may be taken.

    Composer also waits for the optimizer, to read losses, and then for messages about the numbers of tokens and of samples, while
    the GPU has nothing to do. Here losses are read with Stability's figures, before the optimizer is launched, and ranks exchange
    numbers in host memory; what comes between two steps, and the launches of the next one, run beside the optimizer's kernels.

    Losses are logged as Composer does: means over ranks of each rank's part. Every rank must have one. group: of all ranks, for
    messages in host memory.
    """

    def __init__(self, *, group: dist.ProcessGroup, **settings: Any):
        super().__init__(**settings)
        self._group = group
        self._losses: dict[str, float] = {}

    def _train_batch(self, use_grad_scaling: bool) -> Any:
        """None, for Composer would wait for losses. They are logged, and told to callbacks, here."""
        super()._train_batch(use_grad_scaling)
        self.state.total_loss_dict = self._losses
        self.logger.log_metrics(self._losses)

    def _train_microbatches(
        self, microbatches: Sequence[Any], total_loss_dict: dict[str, Tensor], ddp_sync: bool = True
    ) -> Tensor:
        """Gradients of a step, checked and clipped; returns the loss, in host memory."""
        state, spec = self.state, self._train_data_spec
        assert spec is not None
        self.engine.run_event(Event.BEFORE_TRAIN_BATCH)
        for optimizer in state.optimizers:
            optimizer.zero_grad(set_to_none=True)
        labels = sum(spec.get_num_tokens_in_batch(part, token_type="loss_generating") for part in microbatches)
        (labels,), ranks = self._summed(labels), dist.get_world_size()
        batch, losses = state.batch, {}
        for number, part in enumerate(microbatches, 1):
            state.batch = spec.microbatch_transforms(state.device.batch_to_device(part))
            found = self._train_microbatch(False, labels / ranks, number == len(microbatches))
            losses = {name: losses[name] + loss if losses else loss for name, loss in found.items()}
        state.batch = batch
        sums = torch.stack(list(losses.values()))
        if ranks > 1:
            dist.all_reduce(sums)
        sums = sums.to("cpu", non_blocking=True)
        arrived = torch.cuda.Event() if torch.cuda.is_available() else None
        if arrived is not None:
            arrived.record()
        self.engine.run_event(Event.AFTER_TRAIN_BATCH)
        if arrived is not None:
            arrived.synchronize()
        self._losses = {f"loss/train/{name}": total / ranks for name, total in zip(losses, sums.tolist(), strict=True)}
        return torch.tensor(self._losses["loss/train/total"])

    def _iter_dataloader(self, trainer_mode: TrainerMode) -> Iterator[Any]:
        """Batches. Every rank has as many for training, so that none has to tell the others when they end."""
        if trainer_mode != TrainerMode.TRAIN:
            yield from super()._iter_dataloader(trainer_mode)
            return
        assert self.state.dataloader is not None
        length = self.state.dataloader_len
        batches = itertools.islice(self.state.dataloader, None if length is None else int(length))
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
        samples, tokens = self._summed(int(num_samples), num_tokens)
        return samples, tokens, batch_time

    def _summed(self, *numbers: int) -> list[int]:
        """Numbers added up over the ranks, by messages in host memory."""
        shared = torch.tensor(numbers, dtype=torch.int64)
        dist.all_reduce(shared, group=self._group)
        return shared.tolist()
