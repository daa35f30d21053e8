"""Log-likelihoods of packed sequences (packed_plan.py) by a HybridLM."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from llmtrain.eval.scoring.batching import Row
from llmtrain.eval.scoring.packed_plan import Segment
from llmtrain.kernels.async_copy import copy_async
from llmtrain.kernels.attention.prefix_tree import PrefixTree, build_prefix_tree
from llmtrain.models.causal_lm import CausalLM

_MULTIPLE = 128
"""Sequence lengths are padded to this multiple: whole tiles for attention kernels, and few shapes to compile."""


@dataclass(frozen=True)
class _Call:
    """Inputs of one forward pass. owners: (row, number of its scored tokens), in the order of `scored`."""

    ids: Tensor
    scored: Tensor
    labels: Tensor
    tree: PrefixTree
    owners: list[tuple[int, int]]


@dataclass(frozen=True)
class _Pending:
    """Scores that are being copied to the CPU. done: event after the copy; None on a CPU."""

    owners: list[tuple[int, int]]
    likelihoods: Tensor
    greedy: Tensor
    done: torch.cuda.Event | None


def score_packs(
    model: CausalLM, rows: Sequence[Row], packs: Iterable[Sequence[Segment]], host_work: Callable[[], bool]
) -> Iterator[tuple[int, tuple[float, bool]]]:
    """(row, (log-likelihood, greedy)) of every row. One pack is on the GPU while the scores before it are read.

    host_work: called while the GPU is busy, until it returns False.
    """
    pending: _Pending | None = None
    for pack in packs:
        started = _start(model, rows, pack)
        if pending is not None:
            yield from _scores(pending, host_work)
        pending = started
    if pending is not None:
        yield from _scores(pending, host_work)


def _start(model: CausalLM, rows: Sequence[Row], pack: Sequence[Segment]) -> _Pending:
    device = model.device
    call = _call(rows, pack, device)
    scores = model.packed_scores(call.ids, call.tree, call.scored, call.labels)
    # Copies are queued behind all kernels launched before: started later, they would wait for the next pack.
    likelihoods, greedy = (t.to("cpu", non_blocking=True) for t in (scores.log_likelihood.double(), scores.greedy))
    if device.type != "cuda":
        return _Pending(call.owners, likelihoods, greedy, None)
    done = torch.cuda.Event()
    done.record(torch.cuda.current_stream(device))
    return _Pending(call.owners, likelihoods, greedy, done)


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
    lengths, ancestors = [len(segment.tokens) for segment in pack], [segment.ancestors for segment in pack]
    if padding := -len(ids) % _MULTIPLE:  # a segment of its own that no row attends to
        ids += [0] * padding
        lengths.append(padding)
        ancestors.append(())
    parts = [copy_async(torch.from_numpy(np.array(values, dtype=np.int64)), device) for values in (ids, scored, labels)]
    return _Call(parts[0][None], parts[1], parts[2], build_prefix_tree(lengths, ancestors).to(device), owners)


def _scores(pending: _Pending, host_work: Callable[[], bool]) -> Iterator[tuple[int, tuple[float, bool]]]:
    if pending.done is not None:
        while not pending.done.query() and host_work():
            pass
        pending.done.synchronize()
    likelihoods, greedy = pending.likelihoods.tolist(), pending.greedy.tolist()
    at = 0
    for row, count in pending.owners:
        yield row, (sum(likelihoods[at : at + count]), all(greedy[at : at + count]))
        at += count
