"""The mixture of training streams: its phases in steps, their order, and what a run will read of each stream. No torch here."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import numpy as np

from llmtrain.config.base import Problem
from llmtrain.data.loader.mixture_blocks import MixtureBlocks, Phase
from llmtrain.data.loader.order import SampleOrder
from llmtrain.data.shards.checks import epoch_streams, require_epoch
from llmtrain.schema.data import DataConfig, MixturePhase


def mixture_phases(data: DataConfig, global_batch_size: int, samples: Sequence[int]) -> tuple[Phase, ...]:
    """Phases of data.mixture, or one of the streams' own shares; empty where each stream counts by its size.

    samples: of each stream. Where the last phase is a budget, a further one begins at its end, with the same proportions.
    """
    streams = data.train_streams()
    if len(streams) == 1:
        return ()
    if data.mixture is not None:
        ends = _phase_ends(data, data.mixture, global_batch_size, samples)
        shares = [_stream_samples(phase, data, samples) for phase in data.mixture]
        firsts = [0, *(end for end in ends if end is not None)]
        return tuple(
            Phase(first, tuple(map(float, one))) for first, one in zip(firsts, [*shares, shares[-1]], strict=False)
        )
    if any(stream.is_budget for stream in streams.values()):
        shares = tuple(map(float, epoch_streams(data, samples)))
        # Cut there, so that an epoch reads what it should; further epochs go on in these proportions.
        return (Phase(0, shares), Phase(require_epoch(data, samples, global_batch_size) // global_batch_size, shares))
    given = tuple(stream.proportion for stream in streams.values())
    return (Phase(0, tuple(map(float, given))),) if all(given) else ()  # type: ignore[arg-type]


def _stream_samples(phase: MixturePhase, data: DataConfig, samples: Sequence[int]) -> tuple[Fraction, ...]:
    """Samples of each stream in a phase of tokens or repeats; the shares of one of proportions."""
    shares = [Fraction(phase.shares[name]).limit_denominator(10**6) for name in data.train_streams()]
    if phase.repeats is not None:
        return tuple(repeats * size for repeats, size in zip(shares, samples, strict=True))
    return tuple(share / data.seq_len if phase.tokens is not None else share for share in shares)


def _phase_ends(
    data: DataConfig, phases: Sequence[MixturePhase], global_batch_size: int, samples: Sequence[int]
) -> list[int | None]:
    """Steps at which the phases end, rounded up; None for a last phase of proportions."""
    tokens_per_step = global_batch_size * data.seq_len
    ends: list[int | None] = []
    read = Fraction(0)  # samples up to the end of the phase
    for phase in phases:
        if phase.is_budget:
            read += sum(_stream_samples(phase, data, samples))
            steps = math.ceil(read / global_batch_size)
        elif phase.until is not None:
            steps = phase.until.steps(tokens_per_step=tokens_per_step, steps_per_epoch=None, total_steps=None)
            read = Fraction(steps * global_batch_size)
        else:
            steps = None
        ends.append(steps)
    return ends


def mixture_problems(
    data: DataConfig, global_batch_size: int, samples: Sequence[int] | None, steps: int | None
) -> Iterator[Problem]:
    """Phases that do not follow one another, and a run that is longer than they are; paths are the whole config's.

    samples: of each stream, None where they are not known. steps: of the run, None where they are not known.
    """
    if not data.mixture or (samples is None and any(phase.repeats is not None for phase in data.mixture)):
        return
    ends = _phase_ends(data, data.mixture, global_batch_size, samples or [0] * len(data.train_streams()))
    for number, (before, end) in enumerate(itertools.pairwise([0, *ends])):
        if end is not None and before is not None and end <= before:
            phase = data.mixture[number]
            name = "until" if phase.until else next(iter(phase.given))
            found = str(phase.until) if phase.until else None
            yield Problem(
                f"data.mixture.{number}.{name}", found, f"ends at step {end:,}, but the phase begins at step {before:,}"
            )
    if steps is not None and ends[-1] is not None and steps > ends[-1]:
        message = (
            f"are {steps:,} steps, but the phases of data.mixture end at step {ends[-1]:,}: shorten it, or add a last phase of "
            "proportions"
        )
        yield Problem("train.duration", None, message)


def seekable_order(data: DataConfig, global_batch_size: int, sizes: Sequence[np.ndarray]) -> SampleOrder:
    """The order that `data.order: seekable` means. sizes: samples of each shard, by stream."""
    phases = mixture_phases(data, global_batch_size, [int(one.sum()) for one in sizes])
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


def unchanged_steps(
    before: Sequence[Mapping[str, Any]], data: DataConfig, global_batch_size: int, samples: Sequence[int]
) -> int | None:
    """Steps from the start of a run that read the same with data.mixture as with the phases `before`; None: all.

    before: as a checkpoint stores them. samples: of each stream.
    """
    first, second = (_blocks(one, global_batch_size, samples) for one in (_with_phases(data, before), data))
    if first is None or second is None:  # of one stream
        return None
    same = first.same_draws(second)
    return None if same is None else same // _share(data, global_batch_size)


def allowed_change(
    before: Sequence[Mapping[str, Any]], data: DataConfig, global_batch_size: int, samples: Sequence[int], read: int
) -> str:
    """Sentence on what of the phases `before` a run that has read so many steps, one at least, may change. before, samples: as in
    unchanged_steps."""
    blocks, share = _blocks(_with_phases(data, before), global_batch_size, samples), _share(data, global_batch_size)
    assert blocks is not None  # of one stream, all is the same
    begin, earliest, end = blocks.earliest_end(read * share)
    ends = [] if end is None else [f"where it does, at step {end // share:,}"]
    if end is None or earliest < end:
        ends.append(f"at step {-(-earliest // share):,} or later")
    return (
        f"The phase from step {begin // share:,} on is at work: it may {'have no end, or ' if end is None else ''}end "
        f"{', or '.join(ends)}; its shares and the phases before it must stay, and so must the smallest share of all phases, about"
    )


def _with_phases(data: DataConfig, phases: Sequence[Mapping[str, Any]]) -> DataConfig:
    return data.model_copy(update={"mixture": [MixturePhase.model_validate(phase) for phase in phases]})


def _share(data: DataConfig, global_batch_size: int) -> int:
    """Samples of a lane in a step."""
    return global_batch_size // math.gcd(global_batch_size, data.num_canonical_nodes)


def _blocks(data: DataConfig, global_batch_size: int, samples: Sequence[int]) -> MixtureBlocks | None:
    """The draws of data.mixture; None for one stream. samples: of each stream."""
    phases, share = mixture_phases(data, global_batch_size, samples), _share(data, global_batch_size)
    if not phases:
        return None
    return MixtureBlocks(phases, share, global_batch_size // share, data.shuffle_seed, even=data.stratified)


def mixture_report(data: DataConfig, order: SampleOrder, samples: Sequence[int], steps: int) -> list[str]:
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
