"""Prediction of each next token: the cross entropy of pretraining, and its validation in nats per token and bits per byte."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torchmetrics import Metric

from llmtrain.models.loss import IGNORE, LossOutput
from llmtrain.objectives.base import Batch, Objective, Outputs
from llmtrain.objectives.sections import NextTokenSection


@dataclass(frozen=True)
class NextToken(Objective):
    """Cross entropy of `labels` [batch, T], IGNORE where there is none, plus the z-loss of train.loss."""

    section: NextTokenSection = NextTokenSection()  # noqa: RUF009 (frozen)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("labels",)

    def count(self, batch: Batch) -> int:
        """Labelled tokens: as the loader's processes counted them, or else counted here, which takes some 6 ms of CPU time for
        524,288 tokens, by the threads of PyTorch, which wait for each other where others use the cores as well."""
        counts = batch.get("label_counts")
        return int((batch["labels"] != IGNORE).sum() if counts is None else counts.sum())

    def loss(self, outputs: Outputs, batch: Batch) -> LossOutput:
        return outputs.model.cross_entropy(outputs.hidden, outputs.head, batch["labels"])

    def example(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"labels": tokens}

    def metrics(self, streams: Mapping[str, range]) -> dict[str, Metric]:
        """`cross_entropy` and `bits_per_byte`, and both for each stream, as `STREAM/cross_entropy`."""
        found: dict[str, Metric] = {"cross_entropy": NatsPerToken(), "bits_per_byte": BitsPerByte()}
        for name, ids in streams.items():
            found |= {f"{name}/cross_entropy": NatsPerToken(ids), f"{name}/bits_per_byte": BitsPerByte(ids)}
        return found

    def update(self, metric: Metric, batch: Batch, output: LossOutput) -> None:
        nats = output.terms["cross_entropy"].double() * output.n_tokens
        metric.update(nats, output.n_tokens, batch["text_bytes"], batch["sample_ids"])


class NatsPerToken(Metric):
    """Cross entropy over all labelled tokens of all batches and ranks, summed in fp64.

    samples: count only batches with samples among these; None: all.
    """

    full_state_update = False
    nats: torch.Tensor
    per: torch.Tensor

    def __init__(self, samples: range | None = None):
        super().__init__()
        self.samples = samples
        for name in ("nats", "per"):
            self.add_state(name, default=torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(
        self, nats: torch.Tensor, tokens: torch.Tensor, text_bytes: torch.Tensor, sample_ids: torch.Tensor
    ) -> None:
        """nats: sum over the batch. tokens: how many have a label. text_bytes: [batch], -1 where unknown. sample_ids: [batch],
        -1 for fillers."""
        per = self.units(tokens, text_bytes)
        if self.samples is not None:
            counts = ((sample_ids >= self.samples.start) & (sample_ids < self.samples.stop)).any()
            nats, per = (torch.where(counts, value, torch.zeros_like(value)) for value in (nats, per))
        self.nats += nats
        self.per += per

    def units(self, tokens: torch.Tensor, text_bytes: torch.Tensor) -> torch.Tensor:
        """The divisor of the sum, for one batch."""
        return tokens

    def compute(self) -> torch.Tensor:
        return self.nats / self.per


class BitsPerByte(NatsPerToken):
    """The same sum in bits, per byte of the text behind the labels: comparable between tokenizers. NaN where unknown."""

    def units(self, tokens: torch.Tensor, text_bytes: torch.Tensor) -> torch.Tensor:
        return torch.where(text_bytes < 0, torch.nan, text_bytes.double()).sum()

    def compute(self) -> torch.Tensor:
        return super().compute() / math.log(2)
