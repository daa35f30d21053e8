"""Batches of preferences, as the loader makes them."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.objectives.preference import UNDESIRABLE

IGNORE = -100


def rows(documents: list[tuple[Tensor, int]], per_row: int, seq_len: int) -> dict[str, Tensor]:
    """A batch without references, of documents: (tokens, length of the prompt), so many of them in a sample."""
    count = -(-len(documents) // per_row)
    ids = torch.zeros(count, seq_len, dtype=torch.int64)
    labels, of = torch.full_like(ids, IGNORE), torch.zeros(count, seq_len, dtype=torch.int32)
    for row in range(count):
        at = 0
        for number, (tokens, prompt) in enumerate(documents[row * per_row : (row + 1) * per_row]):
            end = at + len(tokens)
            ids[row, at:end] = tokens
            labels[row, at + prompt - 1 : end - 1] = tokens[prompt:]
            of[row, at:end] = number
            at = end
        of[row, at:] = torch.arange(seq_len - at) + per_row  # what fills a sample
    return {
        "input_ids": ids,
        "labels": labels,
        "document_ids": of,
        UNDESIRABLE: torch.zeros_like(ids, dtype=torch.bool),
        "sample_ids": torch.arange(count),
    }
