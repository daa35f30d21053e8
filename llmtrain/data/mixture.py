"""The mixture of training streams: its phases in steps, their order, and what a run will read of each stream. No torch here."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from llmtrain.config.base import Problem
from llmtrain.data.order import Phase, SampleOrder
from llmtrain.schema.data import DataConfig


def mixture_phases(data: DataConfig, global_batch_size: int) -> tuple[Phase, ...]:
    """Phases of data.mixture, or one of the streams' proportions; empty where each stream counts by its size."""
    streams = data.train_streams()
    if data.mixture is None:
        given = tuple(stream.proportion for stream in streams.values())
        return (Phase(0, tuple(map(float, given))),) if all(given) and len(given) > 1 else ()  # type: ignore[arg-type]
    if len(streams) == 1:
        return ()
    ends = [phase.until for phase in data.mixture[:-1]]
    length = {"tokens_per_step": global_batch_size * data.seq_len, "steps_per_epoch": None, "total_steps": None}
    firsts = [0, *(end.steps(**length) for end in ends if end)]
    return tuple(
        Phase(first, tuple(phase.proportions[name] for name in streams))
        for first, phase in zip(firsts, data.mixture, strict=True)
    )


def mixture_problems(data: DataConfig, global_batch_size: int) -> Iterator[Problem]:
    """Phases that do not follow one another; paths begin with `data.`."""
    firsts = [phase.first_step for phase in mixture_phases(data, global_batch_size)]
    for number, (before, after) in enumerate(itertools.pairwise(firsts)):
        if after <= before:
            until = data.mixture[number].until if data.mixture else None
            message = f"is step {after:,}, but the phase begins at step {before:,}"
            yield Problem(f"data.mixture.{number}.until", str(until), message)


def seekable_order(data: DataConfig, global_batch_size: int, sizes: Sequence[np.ndarray]) -> SampleOrder:
    """The order that `data.order: seekable` means. sizes: samples of each shard, by stream."""
    phases = mixture_phases(data, global_batch_size)
    return SampleOrder(
        sizes if phases else [np.concatenate(sizes)],
        phases,
        global_batch=global_batch_size,
        canonical_nodes=data.num_canonical_nodes,
        seed=data.shuffle_seed,
        shuffle=data.shuffle,
        window=data.shuffle_block_size,
        stratified=data.stratified,
    )


def mixture_report(data: DataConfig, order: SampleOrder, samples: list[int], steps: int) -> list[str]:
    """Lines on what a run of so many steps reads of each stream: its share, and how often all of it. samples: of each stream."""
    counts, total = order.counts(steps), steps * order.global_batch
    if len(counts) == 1:
        counts = [counts[0] * size // sum(samples) for size in samples]
    lines = []
    for name, count, size in zip(data.train_streams(), counts, samples, strict=True):
        passes = count / size
        line = f"data: {name}: {100 * count / total:.1f} % of the samples, {count * data.seq_len:,} tokens, {passes:.2f} passes"
        lines.append(f"WARNING: {line}: it is read more than once" if passes > 1.0 else line)
    return lines
