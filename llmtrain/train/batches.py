"""A rank's part of a batch, and its microbatches."""

from typing import Any

import torch
import torch.nn.functional as F

from llmtrain.models.loss import IGNORE
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks, padding_unit
from llmtrain.objectives.base import Batch, Objective


def microbatches(
    batch: Batch,
    size: int,
    objective: Objective,
    segments: ContextParallelRanks | None = None,
    ranks: TensorRanks | None = None,
) -> list[dict[str, Any]]:
    """This rank's part of a batch in pieces of `size` samples, each with the number of its labels (Objective.count) as `n_labels`,
    an int, in place of the batch's `label_counts`, and what it counts beside as `step_counts` (Step has their sums there): once a
    microbatch is on the GPU, counting would wait for the device.
    """
    if segments is not None or ranks is not None:
        batch = own_part(batch, segments, ranks)
    parts = [
        {key: value[i : i + size] for key, value in batch.items()} for i in range(0, len(batch["sample_ids"]), size)
    ]
    found = []
    for part in parts:
        count = objective.count(part)
        counts = {"n_labels": count, "step_counts": (count, *objective.further_counts(part))}
        found.append({key: value for key, value in part.items() if key != "label_counts"} | counts)
    return found


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
