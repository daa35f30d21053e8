"""Gradient clipping, and the policy for a loss or gradient that is not finite."""

from __future__ import annotations

import math

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch.distributed.tensor import DTensor

from llmtrain.errors import RunError
from llmtrain.logs import run_log
from llmtrain.schema.training import TrainConfig


class NonFiniteError(RunError):
    """The loss or a gradient became NaN or infinite; the message names the step and the samples."""


class Stability(Callback):
    """Measures and clips the global gradient norm before the optimizer step, and guards the step.

    One host synchronisation a step, for the decision to take it or not.
    """

    def __init__(self, config: TrainConfig):
        self.max_norm = config.clip_grad_norm if config.clip_grad_norm is not None else math.inf
        self.policy, self.max_skipped = config.nonfinite, config.max_skipped_steps
        self.skipped = self.skipped_in_a_row = 0
        self._loss: torch.Tensor | None = None

    def after_loss(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, dict)
        loss = state.loss["total"].detach()
        self._loss = loss if self._loss is None else self._loss + loss

    def after_train_batch(self, state: State, logger: Logger) -> None:
        assert self._loss is not None
        parameters = [p for p in state.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.max_norm, foreach=True)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        # A loss is local to a rank, the norm is not; all ranks must take the step, or none.
        bad_loss = (~torch.isfinite(self._loss)).float().reshape(1)
        worst = bad_loss.clone()
        dist.all_reduce(worst, reduce_operation="MAX")
        value, any_bad_loss = torch.cat([norm.reshape(1).float(), worst]).tolist()
        self._loss = None
        logger.log_metrics({"train/grad_norm": value})
        if math.isfinite(value) and not any_bad_loss:
            self.skipped_in_a_row = 0
            return
        message = self._describe(state, bool(bad_loss.item()), value)
        self.skipped_in_a_row += 1
        if self.policy == "stop":
            raise NonFiniteError(
                f"{message}. Nothing of this step was applied; set train.nonfinite: skip to drop such steps"
            )
        if self.skipped_in_a_row > self.max_skipped:
            raise NonFiniteError(
                f"{message}. {self.max_skipped} steps in a row were skipped before it (train.max_skipped_steps)"
            )
        self.skipped += 1
        logger.log_metrics({"train/skipped_steps": self.skipped})
        run_log.warning(f"skipped: {message}")
        for parameter in parameters:
            parameter.grad = None  # optimizers leave a parameter without gradient, and its state, as they are

    def _describe(self, state: State, bad_loss: bool, norm: float) -> str:
        ids = state.batch["sample_ids"].tolist()
        everyone = dist.all_gather_object((dist.get_global_rank(), bad_loss, ids))
        culprits = [entry for entry in everyone if entry[1]] or everyone
        what = "the loss" if any(entry[1] for entry in everyone) else f"the gradient norm ({norm})"
        where = "; ".join(f"rank {rank}: {_shorten(ids)}" for rank, _, ids in culprits)
        return f"{what} is not finite at step {state.timestamp.batch.value + 1}; sample ids of {where}"


def _shorten(ids: list[int], limit: int = 32) -> str:
    text = ", ".join(map(str, ids[:limit]))
    return text if len(ids) <= limit else f"{text}, … ({len(ids)} in all)"
