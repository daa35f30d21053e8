"""Reads packs (packing.py) by a HybridLM."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmtrain.eval.scoring.batching import Row
from llmtrain.eval.scoring.packing import Segment
from llmtrain.kernels.async_copy import copy_async
from llmtrain.kernels.attention.prefix_tree import PrefixTree, build_prefix_tree
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
    tree: PrefixTree
    owners: list[tuple[int, int]]


@dataclass(frozen=True)
class _Running:
    """Scores on their way to the CPU, where they are once the GPU is `done`; None: it is no GPU."""

    owners: list[tuple[int, int]]
    likelihoods: Tensor
    greedy: Tensor
    done: torch.cuda.Event | None


def read_packs(
    model: HybridLM, rows: Sequence[Row], packs: Iterable[Sequence[Segment]], meanwhile: Callable[[], bool]
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """(row, (log-likelihood, greedy)). The GPU works on a pack while the last one's scores are read and the next is made.

    meanwhile: does some other work while the GPU is busy, until it says False.
    """
    running: _Running | None = None
    for pack in packs:
        started = _start(model, rows, pack)
        if running is not None:
            yield from _answers(running, meanwhile)
        running = started
    if running is not None:
        yield from _answers(running, meanwhile)


def _start(model: HybridLM, rows: Sequence[Row], pack: Sequence[Segment]) -> _Running:
    device = model.embed.weight.device
    call = _call(rows, pack, device)
    scores = model(call.ids, call.labels, tree=call.tree, scored=call.scored)
    assert isinstance(scores, TokenScores)
    # Copies wait for all that the GPU was asked before: later they would wait for the next pack.
    likelihoods, greedy = (t.to("cpu", non_blocking=True) for t in (scores.log_likelihood.double(), scores.greedy))
    if device.type != "cuda":
        return _Running(call.owners, likelihoods, greedy, None)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return _Running(call.owners, likelihoods, greedy, done)


def _call(rows: Sequence[Row], pack: Sequence[Segment], device: torch.device) -> _Call:
    ids: list[int] = []
    scored: list[int] = []
    labels: list[int] = []
    owners: list[tuple[int, int]] = []
    for tokens, _, number in pack:
        ids += tokens
        if number is not None:
            row = rows[number]
            scored += range(len(ids) - row.scored, len(ids))
            labels += row.tokens[-row.scored :]
            owners.append((number, row.scored))
    lengths, ancestors = [len(segment.tokens) for segment in pack], [segment.above for segment in pack]
    if padding := -len(ids) % _MULTIPLE:  # a text that nobody looks at
        ids += [0] * padding
        lengths.append(padding)
        ancestors.append(())
    parts = [copy_async(torch.from_numpy(np.array(values, dtype=np.int64)), device) for values in (ids, scored, labels)]
    return _Call(parts[0][None], parts[1], parts[2], build_prefix_tree(lengths, ancestors).to(device), owners)


def _answers(running: _Running, meanwhile: Callable[[], bool]) -> Iterator[tuple[int, tuple[float, bool]]]:
    if running.done is not None:
        while not running.done.query() and meanwhile():
            pass
        running.done.synchronize()
    likelihoods, greedy = running.likelihoods.tolist(), running.greedy.tolist()
    at = 0
    for row, count in running.owners:
        yield row, (sum(likelihoods[at : at + count]), all(greedy[at : at + count]))
        at += count
