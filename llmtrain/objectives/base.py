"""Objectives: what turns a model's outputs into the loss that training minimises."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torchmetrics import Metric

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.context import Context
from llmtrain.models.hybrid import Stream
from llmtrain.models.loss import LossOutput
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.objectives.section import ObjectiveSection

Result = TypeVar("Result")
Batch = Mapping[str, Any]
"""Tensors of llmtrain.data.loader.batches.Batch, on the CPU or a device."""


@dataclass(frozen=True)
class Outputs:
    """Results of a model for a batch. hidden: [batch, T, d_model], after the final norm. head: weight [vocab_size, d_model], or
    this rank's part of it."""

    model: CausalLM
    hidden: Tensor
    head: Tensor


class Objective(ABC):
    """A loss over batches. `input_ids` and `document_ids`, where there are any, are read by the model."""

    count_name: ClassVar[str | None] = None
    """Metric that logs the count of each step; None: it is that of all tokens."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, ...]:
        """Tensors of a batch that `loss` reads."""

    @abstractmethod
    def count(self, batch: Batch) -> int:
        """Units of a batch in host memory over which `loss` is a mean: the weight of a microbatch, and of a rank's part."""

    def further_counts(self, batch: Batch) -> tuple[int, ...]:
        """Other numbers of a batch in host memory that `loss` divides by. Each microbatch of a step has the sums over all of them
        and all ranks, once of those that count the same, as `step_counts`, ints, that of `count` first."""
        return ()

    @property
    def has_step_sums(self) -> bool:
        """`loss` needs `step_sums` over all microbatches of a step and all ranks: a pass without gradients comes before them."""
        return False

    def step_sums(self, outputs: Outputs, batch: Batch) -> Tensor:
        """Sums of a microbatch, [n]. All microbatches then have the sum as `step_sums`."""
        raise NotImplementedError

    @abstractmethod
    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The mean over the batch's units, as are its terms. Within one call of the model, where FSDP2 has gathered the head."""

    @abstractmethod
    def example(self, tokens: Tensor) -> dict[str, Tensor]:
        """`columns` of a batch of these tokens [batch, T], to measure time and memory with."""

    @abstractmethod
    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """Metrics of validation by name. streams: sample ids of each validation stream that gets metrics of its own."""

    @abstractmethod
    def update(self, metric: Metric, batch: Batch, output: LossOutput) -> None:
        """Add a batch of validation, and its loss, to one of `metrics`."""


def build_objective(section: ObjectiveSection) -> Objective:
    """The objective of a section."""
    return section.load_implementation()(section)


def compute_loss(
    model: CausalLM, objective: Objective, batch: Batch, segments: ContextParallelRanks | None = None
) -> LossOutput:
    """The loss of a batch on the model's device, to differentiate. segments: as CausalLM.loss."""
    return loss_in(model.context(batch["input_ids"], batch.get("document_ids"), segments), model, objective, batch)


def loss_in(
    context: Context, model: CausalLM, objective: Objective, batch: Batch, inputs: Stream | None = None
) -> LossOutput:
    """The same in a context that the caller has made. inputs: what the last stage of a pipeline reads, instead of token ids."""
    return context.with_attached(_computed(context, model, batch, objective.loss, inputs))


@torch.no_grad()
def without_gradient(
    model: CausalLM,
    batch: Batch,
    compute: Callable[[Outputs, Batch], Result],
    segments: ContextParallelRanks | None = None,
) -> Result:
    """Something else of a model's results for a batch on its device."""
    context = model.context(batch["input_ids"], batch.get("document_ids"), segments)
    return _computed(context, model, batch, compute)


def _computed(
    context: Context,
    model: CausalLM,
    batch: Batch,
    compute: Callable[[Outputs, Batch], Result],
    inputs: Stream | None = None,
) -> Result:
    read = batch["input_ids"] if inputs is None else inputs
    return model(read, context, lambda hidden, head: compute(Outputs(model, hidden, head), batch))
