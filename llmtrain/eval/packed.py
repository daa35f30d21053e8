"""Reads packs (packing.py) by a HybridLM of attention alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.eval.batching import Row
from llmtrain.eval.packing import Packs, Segment
from llmtrain.kernels.attention.tree import Tree, moved_to, tree
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.loss import TokenScores

_MULTIPLE = 128
"""Of a sequence's length: what the attention kernels walk over in whole tiles, and few shapes to compile for."""


@dataclass(frozen=True)
class _Call:
    """owners: (row, how many of the scored tokens are its own), in order."""

    ids: Tensor
    scored: Tensor
    labels: Tensor
    tree: Tree
    owners: list[tuple[int, int]]


def read_packs(model: HybridLM, plan: Packs) -> Iterator[tuple[int, tuple[float, bool]]]:
    """(row, (log-likelihood, greedy)). The GPU works on a pack while the next is made, and the last one's scores are read."""
    device = model.embed.weight.device
    running: tuple[_Call, TokenScores] | None = None
    for pack in plan.packs:
        call = _call(plan.rows, pack, device)
        scores = model(call.ids, call.labels, tree=call.tree, scored=call.scored)
        if running is not None:
            yield from _answers(*running)
        running = call, scores
    if running is not None:
        yield from _answers(*running)


def _call(rows: Sequence[Row], pack: Sequence[Segment], device: torch.device) -> _Call:
    ids: list[int] = []
    scored: list[int] = []
    labels: list[int] = []
    owners: list[tuple[int, int]] = []
    for segment in pack:
        ids += segment.tokens
        if segment.row is not None:
            row = rows[segment.row]
            scored += range(len(ids) - row.scored, len(ids))
            labels += row.tokens[-row.scored :]
            owners.append((segment.row, row.scored))
    lengths, above = [len(segment.tokens) for segment in pack], [segment.above for segment in pack]
    padding = -len(ids) % _MULTIPLE  # texts of one token, which nobody looks at
    ids += [0] * padding
    lengths += [1] * padding
    above += [()] * padding
    parts = [moved_to(torch.tensor(values), device) for values in (ids, scored, labels)]
    return _Call(parts[0][None], parts[1], parts[2], tree(lengths, above).to(device), owners)


def _answers(call: _Call, scores: TokenScores) -> Iterator[tuple[int, tuple[float, bool]]]:
    likelihoods, greedy = scores.log_likelihood.double().tolist(), scores.greedy.tolist()
    at = 0
    for row, count in call.owners:
        yield row, (sum(likelihoods[at : at + count]), all(greedy[at : at + count]))
        at += count
