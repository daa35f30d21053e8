"""Packed sequences: the documents of a batch as one interval per token."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """First and last token of each token's own document; int32 [batch, T].

    A document is a run of tokens, so one interval per token describes all, neither end falls from one token to the next, and
    i and j share a document if starts[i] <= j <= ends[i] or, equivalently, starts[j] <= i <= ends[j].
    The interval of padding is empty: it sees nothing, and nothing sees it.
    """

    starts: Tensor
    ends: Tensor


def documents(ids: Tensor) -> Documents:
    """ids: integers [batch, T]; a document is a run of equal ids, a negative id is padding. Does not wait for a GPU."""
    assert ids.ndim == 2
    seq_len = ids.shape[1]
    at = torch.arange(seq_len, device=ids.device, dtype=torch.int32).expand(ids.shape)
    change = ids[:, 1:] != ids[:, :-1]
    edge = torch.ones_like(ids[:, :1], dtype=torch.bool)
    starts = torch.where(torch.cat((edge, change), 1), at, 0).cummax(1).values
    ends = torch.where(torch.cat((change, edge), 1), at, seq_len - 1).flip(1).cummin(1).values.flip(1)
    padding = ids < 0
    starts, ends = torch.where(padding, at + 1, starts), torch.where(padding, at - 1, ends)
    return Documents(starts.to(torch.int32).contiguous(), ends.to(torch.int32).contiguous())
