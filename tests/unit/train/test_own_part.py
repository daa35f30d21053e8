"""A rank's part of a batch whose sequences ranks share."""

import pytest
import torch

from llmtrain.models.loss import IGNORE
from llmtrain.models.segments import ContextParallelRanks
from llmtrain.train.batches import own_part


@pytest.mark.parametrize("size", [2, 3])
def test_the_parts_of_a_group_hold_each_label_and_each_byte_once(size):
    """Metrics add up the ranks'. Of 7 tokens, which no group divides, the places added at the end have no label."""
    batch = {
        "input_ids": torch.arange(14).view(2, 7),
        "labels": torch.arange(1, 15).view(2, 7),
        "document_ids": torch.tensor([[0, 0, 0, 1, 1, 2, 2]] * 2),
        "text_bytes": torch.tensor([11, -1]),  # -1: unknown
        "sample_ids": torch.tensor([3, 4]),
    }
    parts = [own_part(batch, ContextParallelRanks(rank, size)) for rank in range(size)]
    labels = torch.cat([part["labels"] for part in parts], dim=1)
    assert sorted(labels[labels != IGNORE].tolist()) == list(range(1, 15))
    for part in parts:
        labelled = part["labels"] != IGNORE
        assert torch.equal(part["input_ids"][labelled] + 1, part["labels"][labelled])
        padded = [0, 0, 0, 1, 1, 2, 2] + [2] * (-7 % (2 * size))
        assert part["document_ids"].tolist() == [padded] * 2  # of whole sequences
    assert sum(part["text_bytes"] for part in parts).tolist() == [11, -1]  # type: ignore[union-attr]
