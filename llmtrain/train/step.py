"""Forward and backward passes of one batch: the one place that a pipeline schedule, pairs of answers or rollouts replace.

batch -> this rank's part -> microbatches -> losses, each weighted by its share of the labels of all ranks -> gradients, which FSDP2
or CUDA graphs add up and reduce. Clipping, the decision to take the step, and the optimizer come after it (trainer.py).
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import LossOutput
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.slices import local_of
from llmtrain.objectives.base import Batch, Objective, compute_loss, without_gradient
from llmtrain.schema.training import Sharding
from llmtrain.train.batches import microbatches
from llmtrain.train.graphs.cuda_graphs import GraphedLoss
from llmtrain.train.graphs.persistent_weights import group_of

Part = dict[str, Any]
"""A microbatch in host memory (batches.py)."""
Observer = Callable[[str, Batch, LossOutput | None], None]
"""Called at each moment of a microbatch, by Composer's names of events: before_forward, without a loss yet, after_forward,
before_loss, after_loss, before_backward, after_backward."""


@dataclass(frozen=True)
class StepResult:
    """losses: `total`, which was differentiated, the objective's terms, and losses that layers attached, of this rank's part of the
    batch; their means over the ranks are those over all labels. Detached, on the model's device. count: Objective.count of all
    ranks, once of tensor-parallel ones. metrics: further numbers of all ranks."""

    losses: dict[str, Tensor]
    count: int
    metrics: dict[str, float] = field(default_factory=dict)


class GradientSync:
    """Marks the last microbatch of a step for FSDP2, which would otherwise reduce gradients, and gather again, for each.

    What is gathered at the peak of every microbatch anyway stays so until the last one: it takes no more memory. With
    `strategy: grad_op`, or where gradients are reduced once a step, that is everything, else what no layer owns. Reductions that
    a microbatch begins last, of the first layers and the embedding, go on beside the next one's forward pass.

    sharding: without `auto`. sync_every_microbatch: null decides by the sharding groups: with one rank in each, nothing is
    saved by reducing after every microbatch. alone: no rank shares anything with others. Then the sums of gradients become those of
    the parameters once all passes are done (`finish`), where FSDP2 would copy them twice in the last one.
    """

    def __init__(self, model: CausalLM, sharding: Sharding):
        assert isinstance(model, FSDPModule)
        self.model = model
        every_microbatch = sharding.sync_every_microbatch
        if every_microbatch is None:
            trained = next(parameter for parameter in model.parameters() if parameter.requires_grad)
            every_microbatch = trained.device_mesh.size(-1) > 1  # type: ignore[attr-defined]
        self.every_microbatch = every_microbatch
        self.all_stays = sharding.strategy == "grad_op" or not every_microbatch
        groups = [group_of(module) for module in model.modules() if isinstance(module, FSDPModule)]
        self.groups = list({id(group): group for group in groups if group is not None}.values())
        self.alone = not every_microbatch and all(map(_alone, self.groups))

    def mark(self, last: bool) -> None:
        """Called before each microbatch's forward pass."""
        if self.every_microbatch:
            self.model.set_is_last_backward(last)
        else:
            self.model.set_requires_gradient_sync(last)
        self.model.set_reshard_after_backward(last, recurse=self.all_stays)
        if isinstance(head := self.model.hybrid.head, FSDPModule):
            head.set_reshard_after_backward(last)

    @torch.no_grad()
    def finish(self) -> None:
        """Hand the sums of a step over to the parameters, reduced over the ranks that share them, where no backward pass was marked
        as the last one. Not where gradients are reduced every microbatch."""
        assert not self.every_microbatch
        self.mark(True)
        for group in filter(_alone, self.groups):
            for one in group.fsdp_params:
                _hand_over(one)
        # FSDP2 reduces what is left at the end of a backward pass, for which it has no public name.
        self.model._get_fsdp_state()._root_post_backward_final_callback()


def _alone(group: Any) -> bool:
    """Parameters that FSDP2 gathers together are of one rank, whose gradients it would take as they are."""
    return group.gradient_divide_factor is None and all(
        one.sharded_param.device_mesh.size() == 1 for one in group.fsdp_params
    )


def _hand_over(one: Any) -> None:
    """Have a parameter's sum, which FSDP2 keeps in the format of reductions, as its gradient, in the same memory where the formats
    are the same."""
    if (whole := getattr(one, "_unsharded_param", None)) is None:  # was never gathered
        return
    total = whole.grad if one.unsharded_accumulated_grad is None else one.unsharded_accumulated_grad
    if total is None:
        return
    whole.grad = one.unsharded_accumulated_grad = None
    gradient = one.to_sharded_dtensor(local_of(total).to(one.sharded_param.dtype).contiguous())
    if one.sharded_param.grad is None:
        one.sharded_param.grad = gradient
    else:
        one.sharded_param.grad += gradient


class Arrivals:
    """Order of the ranks at the beginning of a step, where all exchange numbers in host memory: who waits least there came last.
    Clocks need not agree. group: of all ranks. last, lag: the rank that came last to the step before, and the seconds for which
    the first waited longer than it."""

    def __init__(self, group: dist.ProcessGroup):
        self.group, self.last, self.lag = group, 0, 0.0
        self._waited = 0

    def summed(self, *numbers: int) -> list[int]:
        """Numbers added up over the ranks."""
        waits = [0] * dist.get_world_size(self.group)
        waits[dist.get_rank(self.group)] = self._waited
        began = time.perf_counter_ns()
        found = summed(self.group, *numbers, *waits)
        self._waited = time.perf_counter_ns() - began
        waits = found[len(numbers) :]
        self.last, self.lag = waits.index(min(waits)), (max(waits) - min(waits)) / 1e9
        return found[: len(numbers)]


class Rollouts(Protocol):
    """Batches that are made in the run (train/rollouts)."""

    def ahead(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The loader's batches, seen before they are trained."""
        ...

    def take(self) -> tuple[dict[str, Any], dict[str, float]]:
        """This rank's batch of the next step, and metrics of all ranks. Every rank calls it."""
        ...


class Step:
    """The passes of this rank's part of each batch, in microbatches of `size` samples.

    segments: this rank's, where ranks share sequences. graphs: while they may launch microbatches, of which all are alike to them,
    none is marked for FSDP2; they hand their gradients over after the last one. group: of all ranks, for messages in host memory.
    copies: ranks that count the same labels. rollouts: make the batches that are trained, in place of the loader's.
    """

    def __init__(
        self,
        model: CausalLM,
        objective: Objective,
        size: int,
        sync: GradientSync,
        group: dist.ProcessGroup,
        segments: ContextParallelRanks | None = None,
        graphs: GraphedLoss | None = None,
        copies: int = 1,
    ):
        self.model, self.objective, self.size, self.sync, self.group = model, objective, size, sync, group
        self.segments, self.graphs, self.copies = segments, graphs, copies
        self.arrivals = Arrivals(group)
        self.rollouts: Rollouts | None = None

    def forward_backward(self, batch: Batch, observe: Observer) -> StepResult:
        """Add the gradients of a batch, the same for all ranks of a context- or tensor-parallel group, to those of the parameters.
        Every rank calls it."""
        metrics: dict[str, float] = {}
        if self.rollouts is not None:
            batch, metrics = self.rollouts.take()
        parts = microbatches(batch, self.size, self.objective, self.segments, self.model.hybrid.ranks)
        labels, *further = self.arrivals.summed(*map(sum, zip(*(part["step_counts"] for part in parts), strict=True)))
        mean = max(labels, 1) / dist.get_world_size()
        for part in parts:
            part["step_counts"] = tuple(count // self.copies for count in (labels, *further))
        if self.objective.has_step_sums:
            self._add_step_sums(parts)
        if self.model.hybrid.losses is not None:
            self.model.hybrid.losses.reset()
        losses = self._passes(parts, mean, observe)
        attached = self.model.hybrid.losses
        if attached is not None:
            # Of a stage's layers, and of a tensor-parallel rank's tokens: the mean over all ranks is the step's.
            losses |= {name: term * self.copies for name, term in attached.terms.items()}
        return StepResult(losses, labels // self.copies, metrics)

    def _passes(self, parts: list[Part], mean: float, observe: Observer) -> dict[str, Tensor]:
        """The passes of all microbatches. Returns their losses, weighted and added up. mean: labels of a rank, of all ranks."""
        losses: dict[str, Tensor] = {}
        marks = self.graphs is None or not self.graphs.microbatches
        # Of one microbatch, FSDP2 frees weights in the pass that makes gradients.
        apart = marks and self.sync.alone and len(parts) > 1
        for number, part in enumerate(parts, 1):
            last = number == len(parts)
            if marks:
                self.sync.mark(last and not apart)
            found = self._microbatch(to_device(part, self.model.device), part["n_labels"] / mean, observe)
            if last and self.graphs is not None:
                self.graphs.hand_over()
            losses = {name: losses[name] + loss if losses else loss for name, loss in found.items()}
        if apart:
            self.sync.finish()
        return losses

    def _add_step_sums(self, parts: list[Part]) -> None:
        """Give every microbatch the sums of Objective.step_sums."""
        self.sync.mark(False)
        sums = [
            without_gradient(self.model, to_device(part, self.model.device), self.objective.step_sums, self.segments)
            for part in parts
        ]
        total = torch.stack(sums).sum(0)
        dist.all_reduce(total)
        for part in parts:
            part["step_sums"] = total

    def _microbatch(self, batch: Batch, weight: float, observe: Observer) -> dict[str, Tensor]:
        """The weighted losses. Nothing keeps the autograd graph longer: its nodes remember the stream that they ran on, for which
        a CUDA graph that is recorded meanwhile would have to wait."""
        observe("before_forward", batch, None)
        if self.graphs is None:
            output = compute_loss(self.model, self.objective, batch, self.segments)
        else:
            output = self.graphs(batch)
        for moment in ("after_forward", "before_loss", "after_loss", "before_backward"):
            observe(moment, batch, output)
        (output.loss * weight).backward()
        losses = {"total": output.loss.detach(), **output.terms}
        observe("after_backward", batch, None)
        return {name: loss * weight for name, loss in losses.items()}


def to_device(batch: Batch, device: torch.device) -> dict[str, Any]:
    """The batch with its tensors on the device, to which the host does not wait for them to come."""
    return {
        key: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value for key, value in batch.items()
    }


def summed(group: dist.ProcessGroup, *numbers: int) -> list[int]:
    """Numbers added up over the ranks of a group for messages in host memory."""
    shared = torch.tensor(numbers, dtype=torch.int64)
    dist.all_reduce(shared, group=group)
    return shared.tolist()
