"""The one adapter between a CausalLM and Composer."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from composer.core import DataSpec
from composer.models import ComposerModel
from torch.utils.data import DataLoader
from torchmetrics import Metric

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.loss import IGNORE, LossOutput
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks, padding_unit
from llmtrain.train.graphs.cuda_graphs import GraphedLoss

Batch = Mapping[str, torch.Tensor]
"""Tensors of llmtrain.data.loader.batches.Batch, on the CPU or a device."""


class ComposerHybridLM(ComposerModel):
    """Gives Composer the loss it minimises and the sums its validation needs.

    validation_streams: sample ids of each validation stream, for metrics of its own, `STREAM/cross_entropy`; a batch of
    validation holds samples of one stream alone. segments: this rank's, where ranks share sequences. graphs: of training's
    microbatches, by train.cuda_graphs.
    """

    def __init__(
        self,
        model: CausalLM,
        validation_streams: Mapping[str, range] | None = None,
        segments: ContextParallelRanks | None = None,
        graphs: GraphedLoss | None = None,
    ):
        super().__init__()
        self.model, self.segments, self.graphs = model, segments, graphs
        self.validation_streams = validation_streams or {}

    def forward(self, batch: Batch) -> LossOutput:
        tensors = (batch["input_ids"], batch["labels"], batch.get("document_ids"))
        return self.model.loss(*tensors, self.segments) if self.graphs is None else self.graphs(*tensors)

    def loss(self, outputs: LossOutput, batch: Batch, *args: Any, **kwargs: Any) -> dict[str, torch.Tensor]:
        """`total` is differentiated. Composer weights it by the microbatch's share of the global batch's labelled tokens."""
        losses = {"total": outputs.loss, "cross_entropy": outputs.ce}
        if self.model.loss_function.config.z_loss:
            losses["z"] = outputs.z
        return losses

    def eval_forward(self, batch: Batch, outputs: LossOutput | None = None) -> LossOutput:
        return outputs if outputs is not None else self.forward(batch)

    def get_metrics(self, is_train: bool) -> dict[str, Metric]:
        if is_train:
            return {}
        metrics: dict[str, Metric] = {"cross_entropy": NatsPerToken(), "bits_per_byte": BitsPerByte()}
        for name, ids in self.validation_streams.items():
            metrics |= {f"{name}/cross_entropy": NatsPerToken(ids), f"{name}/bits_per_byte": BitsPerByte(ids)}
        return metrics

    def update_metric(self, batch: Batch, outputs: LossOutput, metric: Metric) -> dict:
        metric.update(
            outputs.ce.double() * outputs.n_tokens, outputs.n_tokens, batch["text_bytes"], batch["sample_ids"]
        )
        return {}


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


def data_spec(
    loader: DataLoader, segments: ContextParallelRanks | None = None, ranks: TensorRanks | None = None
) -> DataSpec:
    """Wrapper by which Composer splits our batches and counts samples and tokens.

    segments: this rank's, where ranks share sequences. The loader's batches are of whole ones, microbatches of this rank's part.
    ranks: tensor-parallel ones; microbatches are the same on all of them.
    """
    # Composer adds up the ranks' counts.
    counts = (segments is None or segments.rank == 0) and (ranks is None or ranks.rank == 0)
    return DataSpec(
        loader,
        split_batch=functools.partial(_split, segments=segments, ranks=ranks),
        get_num_samples_in_batch=lambda batch: len(batch["sample_ids"]) * counts,
        get_num_tokens_in_batch=functools.partial(_count_tokens, counts=counts),
    )


def _split(
    batch: Batch,
    microbatch_size: int | float,
    segments: ContextParallelRanks | None = None,
    ranks: TensorRanks | None = None,
) -> Sequence[dict[str, Any]]:
    """Microbatches, each with its number of labelled tokens as a Python int, in place of the batch's `label_counts`.

    Composer asks for the count again when the microbatch is on the GPU, where counting would wait for the device.
    """
    size = int(microbatch_size)
    if segments is not None or ranks is not None:
        batch = own_part(batch, segments, ranks)
    parts = [
        {key: value[i : i + size] for key, value in batch.items()} for i in range(0, len(batch["sample_ids"]), size)
    ]
    counts = [_labelled(part) for part in parts]
    return [
        {key: value for key, value in part.items() if key != "label_counts"} | {"n_labels": count}
        for part, count in zip(parts, counts, strict=True)
    ]


def _labelled(batch: Mapping[str, Any]) -> int:
    """Number of labelled tokens: as the loader's processes counted them, or else counted here, which takes some 6 ms of CPU time
    for 524,288 tokens, by the threads of PyTorch, which wait for each other where others use the cores as well."""
    counts = batch.get("label_counts")
    return int((batch["labels"] != IGNORE).sum() if counts is None else counts.sum())


def own_part(
    batch: Batch, segments: ContextParallelRanks | None, ranks: TensorRanks | None = None
) -> dict[str, torch.Tensor]:
    """A batch of whole sequences with this rank's part of their tokens and labels: its segments, or all. Documents stay those of
    whole sequences; the bytes of their text are the first rank's, as metrics add up the ranks'.

    Tokens that make the length one that the ranks divide are added at the end, where causal layers do not see them.
    """
    part = dict(batch)
    padding = -batch["input_ids"].shape[1] % padding_unit(segments, ranks)
    for name, value in (("input_ids", 0), ("labels", IGNORE)):
        whole = F.pad(batch[name], (0, padding), value=value)
        part[name] = whole if segments is None else segments.take(whole)
    if segments is not None:
        part.pop("label_counts", None)  # they are those of whole sequences
    if "document_ids" in batch:
        ids = batch["document_ids"]
        part["document_ids"] = torch.cat((ids, ids[:, -1:].expand(-1, padding)), dim=1)
    if segments is not None and segments.rank:
        part["text_bytes"] = torch.zeros_like(batch["text_bytes"])
    return part


def _count_tokens(batch: Mapping[str, Any], counts: bool = True) -> dict[str, int]:
    """total: tokens read, as throughput and schedules count them; loss_generating: labelled ones, as losses are weighted by.

    counts: the tokens of this rank are not those of another too.
    """
    labelled = batch["n_labels"] if "n_labels" in batch else _labelled(batch)
    return {"total": batch["input_ids"].numel() * counts, "loss_generating": labelled}
