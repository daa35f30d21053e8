"""Draws of a mixture: from which source each sample of a run is, computed where it is asked for. No torch here.

Each lane (see data/loader/order.py) draws in blocks. A block holds as many samples of each source as its proportion says, rounded
so that the sums over the lanes and over the blocks of a phase never stray by more than one; their order within the block is
random, or even. A phase ends with a block that is cut to it, so that what was read of each source is exact there as well.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.loader.permutation import key, mix

_ONE = 1 << 32
"""The unit of proportions."""
_SMALLEST_BLOCK = 64
_LARGEST_BLOCKS = 1 << 17
"""Samples of a block of all lanes together. A source with a smaller share has none in most blocks."""


@dataclass(frozen=True)
class Phase:
    """Proportions of the sources, not all zero, from a step on; their scale is arbitrary."""

    first_step: int
    proportions: tuple[float, ...]


@dataclass(frozen=True)
class _Block:
    """The draws of all lanes. source: [samples, lanes]; of_lane, of_all: the number of each draw from its source, among those
    of its lane and among those of all lanes, in the order of time."""

    source: NDArray[np.int64]
    of_lane: NDArray[np.int64]
    of_all: NDArray[np.int64]


class MixtureBlocks:
    """Sources from which the lanes draw: for a lane's sample number 0, 1, 2, … its source, and the number of the draw from it."""

    def __init__(self, phases: Sequence[Phase], share: int, lanes: int, seed: int, *, even: bool):
        """phases: by first_step, the first of which is 0. share: samples of a lane in a step. even: spread each source evenly over
        a block, rather than at random."""
        self._firsts = np.array([phase.first_step * share for phase in phases], np.int64)
        self._edges = [_edges(phase.proportions) for phase in phases]
        largest = max(_LARGEST_BLOCKS // lanes, _SMALLEST_BLOCK)
        self._size = min(max(map(_block_size, phases)), largest)
        self._lanes, self._key, self._even = lanes, key(seed, 3), even
        self._drawn_before = [np.zeros((lanes, len(phases[0].proportions)), np.int64)]
        self._until = functools.lru_cache(maxsize=8)(self._counted)
        self._block = functools.lru_cache(maxsize=3)(self._drawn)
        for number, length in enumerate(np.diff(self._firsts).tolist()):
            self._drawn_before.append(self._until(number, length))

    def draws(
        self, lane: NDArray[np.int64], drawn: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """(source, number of the draw from it by the lane, by all lanes) of the lanes' samples."""
        source, of_lane, of_all = (np.empty(drawn.shape, np.int64) for _ in range(3))
        phase = np.searchsorted(self._firsts, drawn, side="right") - 1
        block, within = np.divmod(drawn - self._firsts[phase], self._size)
        for one, number in np.unique(np.stack([phase.ravel(), block.ravel()]), axis=1).T:
            here = (phase == one) & (block == number)
            found, at = self._block(int(one), int(number)), (within[here], lane[here])
            source[here], of_lane[here], of_all[here] = found.source[at], found.of_lane[at], found.of_all[at]
        return source, of_lane, of_all

    def counts(self, drawn: int) -> list[int]:
        """Samples of each source among the first so many of every lane."""
        phase = int(np.searchsorted(self._firsts, drawn, side="right")) - 1
        block, rest = divmod(drawn - int(self._firsts[phase]), self._size)
        counts = self._until(phase, block * self._size).sum(axis=0)
        if rest:
            counts = counts + np.bincount(self._block(phase, block).source[:rest].ravel(), minlength=len(counts))
        return counts.tolist()

    def same_draws(self, other: MixtureBlocks) -> int | None:
        """Draws of a lane from the start that are the same in a mixture of other phases; None: all."""
        if self._size != other._size:
            return 0
        firsts = [list(map(int, one._firsts)) for one in (self, other)]
        before = 0
        for number, (mine, theirs) in enumerate(itertools.zip_longest(*firsts)):
            if mine != theirs:  # it cuts a block, or else that block is whole
                change = min(first for first in (mine, theirs) if first is not None)
                return before + (change - before) // self._size * self._size
            if self._edges[number] != other._edges[number]:
                return mine
            before = mine
        return None

    def earliest_end(self, drawn: int) -> tuple[int, int, int | None]:
        """(begin, earliest, end) of the phase that the last of so many draws of a lane, one at least, is in: with an end at
        `earliest` or later these draws stay the same. end: None for the last phase."""
        number = int(np.searchsorted(self._firsts, drawn, side="left")) - 1
        begin = int(self._firsts[number])
        end = int(self._firsts[number + 1]) if number + 1 < len(self._firsts) else None
        return begin, begin - (begin - drawn) // self._size * self._size, end

    def _counted(self, phase: int, drawn: int) -> NDArray[np.int64]:
        """Draws of each lane from each source, after so many of a lane in the phase, where a block ends. int64 [lanes, sources]"""
        counts = []
        for lane in range(self._lanes):
            offset = lane * _ONE // self._lanes  # lanes round at different draws
            inner = [(edge * drawn + offset) // _ONE for edge in self._edges[phase][1:-1]]
            counts.append(np.diff([0, *inner, drawn]))
        return self._drawn_before[phase] + np.array(counts, np.int64)

    def _end(self, phase: int, block: int) -> int:
        """Draws of a lane in the phase up to the end of a block."""
        end = (block + 1) * self._size
        last = phase + 1 == len(self._firsts)
        return end if last else min(end, int(self._firsts[phase + 1] - self._firsts[phase]))

    def _drawn(self, phase: int, block: int) -> _Block:
        begin = self._until(phase, block * self._size)
        counts = self._until(phase, self._end(phase, block)) - begin
        source = np.stack([self._ordered(phase, block, lane, counts[lane]) for lane in range(self._lanes)], axis=1)
        of_lane, of_all = np.empty(source.shape, np.int64), np.empty(source.shape, np.int64)
        for number in range(counts.shape[1]):
            here = source == number
            of_lane[here] = (here.cumsum(axis=0) - 1 + begin[:, number])[here]
            of_all[here] = begin[:, number].sum() + np.arange(here.sum())
        return _Block(source, of_lane, of_all)

    def _ordered(self, phase: int, block: int, lane: int, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sources of a lane's draws in a block, with so many of each."""
        source, size = np.repeat(np.arange(len(counts)), counts), int(counts.sum())
        if self._even:
            numbers = np.concatenate([np.arange(count) for count in counts])
            source = source[np.argsort((numbers + 0.5) / np.repeat(counts, counts), kind="stable")]
            return np.roll(source, lane * size // self._lanes)  # or all lanes would draw from one source at a time
        chosen = key(int(self._key), lane, phase, block)
        return source[np.argsort(mix(np.arange(size).astype(np.uint64) ^ chosen), kind="stable")]


def _edges(proportions: Sequence[float]) -> list[int]:
    """Borders of the sources' shares of _ONE."""
    sums = np.cumsum(proportions, dtype=np.float64)
    return [0, *(round(float(edge) / float(sums[-1]) * _ONE) for edge in sums[:-1]), _ONE]


def _block_size(phase: Phase) -> int:
    """Samples of a lane's block, a power of two in which every source with a share has at least one."""
    edges = _edges(phase.proportions)
    least = min(high - low for low, high in itertools.pairwise(edges) if high > low)
    return max(_SMALLEST_BLOCK, 1 << (2 * _ONE // least).bit_length())
