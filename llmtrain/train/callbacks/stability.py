"""Gradient clipping, and the policy for a loss or gradient that is not finite or a spike."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor, nn

from llmtrain.errors import RunError, first_few
from llmtrain.logs import run_log
from llmtrain.models.parameters import parameter_info
from llmtrain.models.slices import boxes, local_of
from llmtrain.models.tensor_parallel import slices_of
from llmtrain.schema.training import TrainConfig
from llmtrain.train.faults.spike_window import SpikeWindow
from llmtrain.train.ranks.tensor_gradients import SharedGradients, clip_shards


class NonFiniteError(RunError):
    """The loss or a gradient became NaN or infinite; the message names the step and the samples."""


class SpikeError(RunError):
    """Too many steps in a row were skipped, the last of them as a spike, or one checkpoint was gone back to too often."""


class Stability(Callback):
    """Measures and clips the global gradient norm before the optimizer step, and guards the step.

    One host synchronisation a step, for the decision to take it or not. spikes: of train.spike. divided: the gradients of a
    model that tensor-parallel ranks divide, of which it sums first what they share. on_spike: called for a spike, which is skipped.
    """

    def __init__(
        self,
        config: TrainConfig,
        spikes: SpikeWindow | None = None,
        divided: SharedGradients | None = None,
        on_spike: Callable[[], None] | None = None,
    ):
        self.spikes, self.divided, self.on_spike = spikes, divided, on_spike
        self.max_norm = config.clip_grad_norm if config.clip_grad_norm is not None else math.inf
        self.policy, self.max_skipped = config.nonfinite, config.max_skipped_steps
        self.skipped = self.skipped_in_a_row = 0
        self._loss: torch.Tensor | None = None
        self._sums: torch.Tensor | None = None

    def after_loss(self, state: State, logger: Logger) -> None:
        assert isinstance(state.loss, dict)
        loss = state.loss["total"].detach()
        self._loss = loss if self._loss is None else self._loss + loss
        if self.spikes is not None:
            labels = state.batch["n_labels"]
            sums = torch.stack((loss.double() * labels, loss.new_full((), labels).double()))
            self._sums = sums if self._sums is None else self._sums + sums

    def after_train_batch(self, state: State, logger: Logger) -> None:
        assert self._loss is not None
        parameters = [p for p in state.model.parameters() if p.grad is not None]
        norm = self._clip(parameters)
        # A loss is local to a rank, the norm is not; all ranks must take the step, or none.
        bad_loss = (~torch.isfinite(self._loss)).float().reshape(1)
        worst = bad_loss.clone()
        dist.all_reduce(worst, reduce_operation="MAX")
        value, any_bad_loss, *shared = torch.cat([norm.reshape(1).float(), worst, *self._shared(norm)]).tolist()
        self._loss = self._sums = None
        logger.log_metrics({"train/grad_norm": value})
        if not math.isfinite(value) or any_bad_loss:
            message = self._describe(state, bool(bad_loss.item()), value)
            if self.policy == "stop":
                raise NonFiniteError(
                    f"{message}. Nothing of this step was applied; set train.nonfinite: skip to drop such steps"
                )
            error: type[RunError] = NonFiniteError
        elif self.spikes is not None and (reason := self.spikes.add(*_means(shared))):
            message, error = self._where(reason, state), SpikeError
            logger.log_metrics({"train/spikes": self.spikes.skipped})
            if self.on_spike is not None:
                self.on_spike()
        else:
            self.skipped_in_a_row = 0
            return
        self.skipped_in_a_row += 1
        if self.skipped_in_a_row > self.max_skipped:
            raise error(
                f"{message}. {self.max_skipped} steps in a row were skipped before it (train.max_skipped_steps)"
            )
        self.skipped += 1
        logger.log_metrics({"train/skipped_steps": self.skipped})
        run_log.warning(f"skipped: {message}")
        for parameter in parameters:
            parameter.grad = None  # optimizers leave a parameter without gradient, and its state, as they are

    def _clip(self, parameters: list[torch.nn.Parameter]) -> torch.Tensor:
        """Clip the gradients; return their norm before, the same on all ranks."""
        if self.divided is not None:
            self.divided.add_up()
            return self.divided.clip(self.max_norm)
        return clip_shards(parameters, self.max_norm)

    def _shared(self, norm: torch.Tensor) -> list[torch.Tensor]:
        """Sums over the ranks, the same on each of them: of losses times labels, of labels, of norms and of ranks. One tensor, or
        none without train.spike."""
        if self._sums is None:
            return []
        sums = torch.cat((self._sums, torch.stack((norm.double(), torch.ones_like(norm, dtype=torch.float64)))))
        dist.all_reduce(sums, reduce_operation="SUM")
        return [sums]

    def _describe(self, state: State, bad_loss: bool, norm: float) -> str:
        everyone = self._samples(state, bad_loss)
        what = "the loss" if any(bad for _, bad, _ in everyone) else f"the gradient norm ({norm})"
        where = self._where(f"{what} is not finite", state, [entry for entry in everyone if entry[1]] or everyone)
        weights = _not_finite(state.model, lambda parameter: parameter)
        where += "" if weights == "none" else f"; weights not finite: {weights}"
        return f"{where}; gradients not finite: {_not_finite(state.model, lambda parameter: parameter.grad)}"

    def _where(self, what: str, state: State, culprits: list[_Samples] | None = None) -> str:
        """culprits: whose samples to name; default: every rank's."""
        culprits = culprits or self._samples(state, False)
        where = "; ".join(f"rank {rank}: {first_few(ids, 32)}" for rank, _, ids in culprits)
        return f"{what} at step {state.timestamp.batch.value + 1}; sample ids of {where}"

    @staticmethod
    def _samples(state: State, bad: bool) -> list[_Samples]:
        return dist.all_gather_object((dist.get_global_rank(), bad, state.batch["sample_ids"].tolist()))


@torch.no_grad()
def _not_finite(model: nn.Module, of: Callable[[nn.Parameter], Tensor | None]) -> str:
    """The parameters, of all ranks' shards, of which something is not finite: of(parameter), the weight or its gradient. Backward
    passes go from the loss to the embedding: it began in the last layer that has one, and there in experts whose matrices have it.
    Every rank calls this."""
    infos, slices = parameter_info(model), slices_of(model)
    own: dict[str, set[int]] = {}
    for parameter, info in infos.items():
        tensor = of(parameter)
        if tensor is None or torch.isfinite(local := local_of(tensor)).all():
            continue
        own[info.name] = set()
        for box in boxes(tensor, slices.get(info.name)) if tensor.ndim == 3 and info.matrix_rows else ():
            bad = (~torch.isfinite(local[box.at])).flatten(1).any(1).nonzero().flatten()
            own[info.name] |= {box.begin[0] + place for place in bad.tolist()}
    everyone = dist.all_gather_object(own)
    order = dict.fromkeys([*(info.name for info in infos.values()), *(name for names in everyone for name in names)])
    found = [name for name in order if any(name in names for names in everyone)]
    if not found or len(found) == len(order):
        return "all" if found else "none"
    last = found[-1]
    experts = sorted(set[int]().union(*(names.get(last, ()) for names in everyone)))
    of_experts = f", of expert {first_few(experts, 8)}" if experts else ""
    return f"{len(found)} of {len(order)}, the last of which is {last.removeprefix('model.hybrid.')}{of_experts}"


_Samples = tuple[int, bool, list[int]]
"""A rank, whether its loss is not finite, and the ids of its samples."""


def _means(shared: list[float]) -> tuple[float, float]:
    """The step's loss per label and its gradient norm, of the sums of `_shared`."""
    losses, labels, norms, ranks = shared
    return losses / max(labels, 1.0), norms / ranks
