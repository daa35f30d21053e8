"""Microbatches, and how many labels each has."""

from typing import Any

import numpy as np
import pytest
import torch

from llmtrain.data.loader.batches import collate, collate_packed, filler
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.objectives.next_token import NextToken
from llmtrain.train.batches import microbatches
from llmtrain.train.composer_model import data_spec

SEQ_LEN = 6
OBJECTIVE = NextToken()


def samples(count: int) -> list[dict[str, Any]]:
    """Samples with end-of-document tokens (0) within, and a filler at the end."""
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 3, SEQ_LEN).astype(np.uint16) for _ in range(count)]
    return [{"tokens": row, "sample_id": n, "text_bytes": 9} for n, row in enumerate(rows)] + [filler(SEQ_LEN)]


def batches() -> list[Any]:
    return [collate(samples(5)), collate_packed(samples(5), eod_id=0)]


class Unread(torch.Tensor):
    """Labels that nobody may look at."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        assert func is torch.Tensor.__getitem__, f"{func} reads all labels"
        return super().__torch_function__(func, types, args, kwargs)


@pytest.mark.parametrize("batch", batches(), ids=["concatenated", "packed"])
def test_labels_are_counted_by_the_loader_and_not_again_by_the_training_process(batch: Any):
    expected = (batch["labels"] != -100).sum(1)
    assert batch["label_counts"].tolist() == expected.tolist()
    unread = batch | {"labels": batch["labels"].as_subclass(Unread)}
    assert OBJECTIVE.count(unread) == int(expected.sum())
    parts = microbatches(unread, 4, OBJECTIVE)
    assert [part["n_labels"] for part in parts] == [int(expected[:4].sum()), int(expected[4:].sum())]
    assert all("label_counts" not in part for part in parts)


@pytest.mark.parametrize("batch", batches(), ids=["concatenated", "packed"])
def test_a_part_of_the_sequences_counts_its_own_labels(batch: Any):
    found = []
    for rank in range(2):
        [part] = microbatches(batch, 6, OBJECTIVE, ContextParallelRanks(rank, 2))
        assert part["n_labels"] == int((part["labels"] != -100).sum())
        found.append(part["n_labels"])
    assert sum(found) == int(batch["label_counts"].sum())


def test_a_batch_without_counts_is_counted():
    batch: Any = {key: value for key, value in collate(samples(5)).items() if key != "label_counts"}
    assert [part["n_labels"] for part in microbatches(batch, 3, OBJECTIVE)] == [15, 10]


def test_one_rank_of_those_that_share_samples_counts_them():
    """Samples and tokens; Composer adds up what the ranks count."""
    loader: Any = [batches()[0]]
    groups = [(context, tensor) for context in range(2) for tensor in range(3)]
    found = []
    for context, tensor in groups:
        segments, ranks = ContextParallelRanks(context, 2), TensorRanks(tensor, 3)
        spec = data_spec(loader, OBJECTIVE, segments, ranks, counts=context == tensor == 0)  # World.is_first_reader
        found.append((spec.get_num_samples_in_batch(loader[0]), spec.get_num_tokens_in_batch(loader[0])))
    alone = data_spec(loader, OBJECTIVE)
    whole = (alone.get_num_samples_in_batch(loader[0]), alone.get_num_tokens_in_batch(loader[0]))
    assert whole == (len(loader[0]["sample_ids"]), loader[0]["input_ids"].numel())
    assert found == [whole, *[(0, 0)] * 5]
