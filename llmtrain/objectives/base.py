"""Objectives: what turns a model's outputs into the loss that training minimises."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torchmetrics import Metric

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import LossConfig
from llmtrain.models.context import Context
from llmtrain.models.loss import LossOutput
from llmtrain.models.segments import ContextParallelRanks

Batch = Mapping[str, Any]
"""Tensors of llmtrain.data.loader.batches.Batch, on the CPU or a device."""


@dataclass(frozen=True)
class Outputs:
    """Results of a model for a batch. hidden: [batch, T, d_model], after the final norm. head: weight [vocab_size, d_model], or
    this rank's part of it."""

    model: CausalLM
    hidden: Tensor
    head: Tensor


class Objective(Protocol):
    """A loss over batches. `input_ids` and `document_ids`, where there are any, are read by the model."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Tensors of a batch that `loss` reads."""
        ...

    def count(self, batch: Batch) -> int:
        """Units of a batch in host memory over which `loss` is a mean: the weight of a microbatch, and of a rank's part."""
        ...

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        """The mean over the batch's units, as are its terms. Within one call of the model, where FSDP2 has gathered the head."""
        ...

    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """Metrics of validation by name. streams: sample ids of each validation stream that gets metrics of its own."""
        ...

    def update(self, metric: Metric, batch: Batch, output: LossOutput) -> None:
        """Add a batch of validation, and its loss, to one of `metrics`."""
        ...


def build_objective(config: LossConfig, name: str = "next_token") -> Objective:
    """The objective of the module `llmtrain.objectives.NAME`."""
    return importlib.import_module(f"llmtrain.objectives.{name}").build(config)


def compute_loss(
    model: CausalLM, objective: Objective, batch: Batch, segments: ContextParallelRanks | None = None
) -> LossOutput:
    """The loss of a batch on the model's device, to differentiate. segments: as CausalLM.loss."""
    return loss_in(model.context(batch["input_ids"], batch.get("document_ids"), segments), model, objective, batch)


def loss_in(context: Context, model: CausalLM, objective: Objective, batch: Batch) -> LossOutput:
    """The same in a context that the caller has made."""
    output = model(
        batch["input_ids"], context, lambda hidden, head: objective.loss(Outputs(model, hidden, head), batch)
    )
    return context.with_attached(output)
