"""Collation of samples into the batches of tensors that the model is given."""

from collections.abc import Mapping
from typing import Any, NotRequired, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from llmtrain.data.shards.index import NOT_MARKED, ShardError
from llmtrain.data.shards.packing import ENDS, TRAINED, UNDESIRABLE, document_ends

IGNORED = -100
"""Label of positions without a loss (cross_entropy's ignore_index)."""


class Batch(TypedDict):
    """input_ids, labels: int64 [batch, seq_len]; labels[t] = input_ids[t + 1], IGNORED at the end and in fillers.
    sample_ids: int64 [batch], -1 for fillers. text_bytes: int64 [batch], UTF-8 bytes of text behind the labels,
    -1 where it is not known. label_counts: int64 [batch], positions with a loss, counted where the batch is made: in a process of
    the loader, while the training process works."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    sample_ids: torch.Tensor
    text_bytes: torch.Tensor
    label_counts: NotRequired[torch.Tensor]


class PackedBatch(Batch):
    """document_ids: int32 [batch, seq_len], documents that end before each token of its sequence. undesirable, with trained_only:
    bool [batch, seq_len], tokens of answers that are labelled so. Further columns are those of TokenSamples.beside."""

    document_ids: torch.Tensor
    undesirable: NotRequired[torch.Tensor]


def filler(seq_len: int, beside: Mapping[str, NDArray] | None = None) -> dict[str, Any]:
    """A sample without any label, which completes the last batch of validation. beside: as TokenSamples'."""
    rows = {name: np.zeros_like(array[0]) for name, array in (beside or {}).items()}
    return {"tokens": np.zeros(seq_len, np.int64), "sample_id": -1, "text_bytes": 0, "beside": rows}


def collate(samples: list[dict[str, Any]]) -> Batch:
    """Stack samples {tokens: [seq_len], sample_id, text_bytes}, as TokenDataset and filler() make them, into a batch."""
    input_ids = torch.from_numpy(np.stack([sample["tokens"] for sample in samples]).astype(np.int64))
    sample_ids = torch.tensor([sample["sample_id"] for sample in samples], dtype=torch.int64)
    labels = torch.full_like(input_ids, IGNORED)
    labels[:, :-1] = input_ids[:, 1:]
    labels[sample_ids < 0] = IGNORED
    text_bytes = torch.tensor([sample["text_bytes"] for sample in samples], dtype=torch.int64)
    return Batch(
        input_ids=input_ids,
        labels=labels,
        sample_ids=sample_ids,
        text_bytes=text_bytes,
        label_counts=(labels != IGNORED).sum(1),
    )


def collate_packed(
    samples: list[dict[str, Any]], eod_id: int, begins: bool | None = None, trained_only: bool = False
) -> PackedBatch:
    """Stack samples with document ids; the first token of a document is no label of the token before it.

    eod_id, begins: as in document_ends, for samples without flags. trained_only: only trained tokens are labels. Raises ShardError
    for samples that have none marked.
    """
    batch = collate(samples)
    ends = torch.from_numpy(document_ends(batch["input_ids"].numpy(), eod_id, begins))
    for row, sample in enumerate(samples):
        if "flags" in sample:
            flags = torch.from_numpy(sample["flags"].copy())
            ends[row] = (flags & ENDS) != 0
            batch["text_bytes"][row] = -1
            if trained_only:
                batch["labels"][row, :-1].masked_fill_((flags[1:] & TRAINED) == 0, IGNORED)
        elif trained_only and sample["sample_id"] >= 0:
            raise ShardError(f"sample {sample['sample_id']} {NOT_MARKED}")
    batch["labels"][ends] = IGNORED
    batch["label_counts"] = (batch["labels"] != IGNORED).sum(1)
    # Shards do not record how much text the removed labels stand for.
    batch["text_bytes"][ends[:, :-1].any(1) & (batch["sample_ids"] >= 0)] = -1
    packed = PackedBatch(**batch, document_ids=(ends.cumsum(1) - ends.long()).to(torch.int32))
    if trained_only:
        none = np.zeros(batch["input_ids"].shape[1], np.uint8)
        flags = np.stack([sample.get("flags", none) for sample in samples])
        packed["undesirable"] = torch.from_numpy((flags & UNDESIRABLE) != 0)
    beside = samples[0].get("beside", {})
    return packed | {name: torch.from_numpy(np.stack([one["beside"][name] for one in samples])) for name in beside}  # type: ignore
