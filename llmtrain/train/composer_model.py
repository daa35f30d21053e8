"""The one adapter between a CausalLM and Composer."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from composer.core import DataSpec
from composer.models import ComposerModel
from torch.utils.data import DataLoader
from torchmetrics import Metric

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import LossOutput

Batch = Mapping[str, torch.Tensor]
"""Tensors of llmtrain.data.batches.Batch, on the CPU or a device."""


class ComposerHybridLM(ComposerModel):
    """Gives Composer the loss it minimises and the sums its validation needs."""

    def __init__(self, model: CausalLM):
        super().__init__()
        self.model = model

    def forward(self, batch: Batch) -> LossOutput:
        return self.model.loss(batch["input_ids"], batch["labels"], batch.get("document_ids"))

    def loss(self, outputs: LossOutput, batch: Batch, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """`total` is differentiated. Composer weights it by the microbatch's share of the global batch's labelled tokens."""
        losses = {"total": outputs.loss, "cross_entropy": outputs.ce}
        if self.model.loss_function.config.z_loss:
            losses["z"] = outputs.z
        return losses

    def eval_forward(self, batch: Batch, outputs: LossOutput | None = None) -> LossOutput:
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        return {} if is_train else {"cross_entropy": NatsPerToken(), "bits_per_byte": BitsPerByte()}

    def update_metric(self, batch: Batch, outputs: LossOutput, metric: Metric) -> dict:
        metric.update(outputs.ce.double() * outputs.n_tokens, outputs.n_tokens, batch["text_bytes"])
        return {}


class NatsPerToken(Metric):
    """Cross entropy over all labelled tokens of all batches and ranks, summed in fp64."""

    full_state_update = False
    nats: torch.Tensor
    per: torch.Tensor

    def __init__(self):
        super().__init__()
        for name in ("nats", "per"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, nats: torch.Tensor, tokens: torch.Tensor, text_bytes: torch.Tensor) -> None:
        """nats: sum over the batch. tokens: how many have a label. text_bytes: [batch], -1 where unknown."""
        self.nats += nats
        self.per += tokens

    def compute(self) -> torch.Tensor:
        return self.nats / self.per


class BitsPerByte(NatsPerToken):
    """The same sum in bits, per byte of the text behind the labels: comparable between tokenizers. NaN where unknown."""

    def update(self, nats: torch.Tensor, tokens: torch.Tensor, text_bytes: torch.Tensor) -> None:
        self.nats += nats
        self.per += torch.where(text_bytes < 0, torch.nan, text_bytes.double()).sum()

    def compute(self) -> torch.Tensor:
        return self.nats / self.per / math.log(2)


def data_spec(loader: DataLoader) -> DataSpec:
    """Wrapper by which Composer splits our batches and counts samples and tokens."""
    return DataSpec(
        loader,
        split_batch=_split,
        get_num_samples_in_batch=lambda batch: len(batch["sample_ids"]),
        get_num_tokens_in_batch=_count_tokens,
    )


def _split(batch: Batch, microbatch_size: int | float) -> Sequence[dict[str, Any]]:
    """Microbatches, each with its number of labelled tokens as a Python int: counted here, on the CPU, once.

    Composer asks for the count again when the microbatch is on the GPU, where counting would wait for the device.
    """
    size = int(microbatch_size)
    parts = [
        {key: value[i : i + size] for key, value in batch.items()} for i in range(0, len(batch["sample_ids"]), size)
    ]
    return [{**part, "n_labels": int((part["labels"] != -100).sum())} for part in parts]


def _count_tokens(batch: Mapping[str, Any]) -> dict[str, int]:
    """total: tokens read, as throughput and schedules count them; loss_generating: labelled ones, as losses are weighted by."""
    labelled = batch["n_labels"] if "n_labels" in batch else int((batch["labels"] != -100).sum())
    return {"total": batch["input_ids"].numel(), "loss_generating": labelled}
