"""The order of a run's samples, computed where it is read: any position in microseconds, with no memory per sample. No torch here.

A run reads positions 0, 1, 2, …; each global batch is `global_batch` of them. A batch is dealt evenly to the canonical nodes, lanes
that never exchange data: a machine reads the lanes of its ranks and needs only their shards. `SampleOrder.ids` says which sample
stands at a position; it knows nothing of ranks or workers, so that they cannot change the order.

Each source is read epoch by epoch without replacement. In every epoch its shards are laid out in a new random order, windows of
that sequence are dealt to the lanes in turn, and samples are shuffled within each window: a machine needs the shards of a window
or two of each of its lanes at a time. A small source is shuffled as a whole.

Where several sources are mixed, each lane draws from them in blocks. A block holds as many samples of each source as its
proportion says, rounded so that the sums over blocks never stray by more than one; their order within the block is random, or
even (`stratified`).
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from llmtrain.data.permutation import key, mix, permute, shuffled

_ONE = 1 << 32
"""The unit of proportions."""
_LARGEST_WINDOW = 1 << 18
_SMALLEST_WINDOW = 1 << 8
_WINDOWS_PER_LANE = 64
"""Windows that a lane has at least in an epoch: two of them are a small part of a source's shards."""
_SMALLEST_BLOCK = 64


@dataclass(frozen=True)
class Phase:
    """Proportions of the sources, not all zero, from a step on; their scale is arbitrary."""

    first_step: int
    proportions: tuple[float, ...]


class SampleOrder:
    """Order of the samples of one or more sources of shards."""

    def __init__(
        self,
        sources: Sequence[np.ndarray],
        phases: Sequence[Phase] = (),
        *,
        global_batch: int,
        canonical_nodes: int,
        seed: int,
        shuffle: bool = True,
        window: int | None = None,
        stratified: bool = False,
    ):
        """sources: samples of each shard, in the order of the sample ids, which go on from one source to the next. phases: by
        first_step, the first of which is 0; needed for several sources. window: samples shuffled together; default: up to
        262,144, less where a source is small."""
        self.global_batch = global_batch
        self.lanes = math.gcd(global_batch, canonical_nodes)
        begins = np.cumsum([0, *(int(sizes.sum()) for sizes in sources)])
        self._sources = [
            _Source(sizes, int(begin), self.lanes, key(seed, number), shuffle, window)
            for number, (sizes, begin) in enumerate(zip(sources, begins, strict=False))
        ]
        share = global_batch // self.lanes
        self._mixtures = (
            [_Mixture(phases, share, lane, self.lanes, seed, shuffle, stratified) for lane in range(self.lanes)]
            if len(sources) > 1
            else []
        )

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at these positions. int64, of the same shape."""
        positions = np.asarray(positions, np.int64)
        step, slot = np.divmod(positions, self.global_batch)
        share = self.global_batch // self.lanes
        lane = slot // share
        drawn = step * share + slot % share  # samples of its lane before it
        if not self._mixtures:
            return self._sources[0].ids(drawn * self.lanes + lane)
        result = np.empty(positions.shape, np.int64)
        for one in np.unique(lane):
            here = lane == one
            source, index = self._mixtures[one].draws(drawn[here])
            found = np.empty(source.shape, np.int64)
            for number in np.unique(source):
                of_it = source == number
                found[of_it] = self._sources[number].ids(index[of_it] * self.lanes + one)
            result[here] = found
        return result

    def counts(self, steps: int) -> list[int]:
        """Samples of each source in the first so many steps."""
        drawn = steps * (self.global_batch // self.lanes)
        if not self._mixtures:
            return [drawn * self.lanes]
        return [sum(numbers) for numbers in zip(*(mixture.counts(drawn) for mixture in self._mixtures), strict=True)]


class _Source:
    """Order of one source: index y = 0, 1, 2, … over all epochs. Lane c reads y = c, c + lanes, c + 2 lanes, …"""

    def __init__(self, sizes: np.ndarray, begin: int, lanes: int, chosen: np.uint64, shuffle: bool, window: int | None):
        self.sizes, self.begin, self.lanes, self.key, self.shuffle = sizes, begin, lanes, int(chosen), shuffle
        self.samples = int(sizes.sum())
        self.window = window or min(_LARGEST_WINDOW, self.samples // (_WINDOWS_PER_LANE * lanes))
        if shuffle and self.window < _SMALLEST_WINDOW and window is None:
            self.window = 0  # all of it is one window
        self._begins = np.cumsum(sizes) - sizes
        self._layout = functools.lru_cache(maxsize=3)(self._laid_out)

    def ids(self, index: np.ndarray) -> np.ndarray:
        epoch, place = np.divmod(index, self.samples)
        result = np.empty(index.shape, np.int64)
        for one in np.unique(epoch):
            here = epoch == one
            result[here] = self.begin + self._in_epoch(int(one), place[here])
        return result

    def _in_epoch(self, epoch: int, place: np.ndarray) -> np.ndarray:
        if self.shuffle and not self.window:
            return permute(place, self.samples, key(self.key, epoch))
        place = self._dealt(epoch, place)
        if not self.shuffle:
            return place
        order, ends = self._layout(epoch)
        rank = np.searchsorted(ends, place, side="right")
        shard = order[rank]
        return self._begins[shard] + place - (ends[rank] - self.sizes[shard])

    def _dealt(self, epoch: int, place: np.ndarray) -> np.ndarray:
        """Places of an epoch's indices in its sequence of shards: windows are dealt to the lanes in turn, what is left at
        the end sample by sample."""
        lanes, size = self.lanes, max(self.window, 1)
        whole = self.samples // (lanes * size) * lanes * size
        row, lane = np.divmod(place, lanes)
        turn, within = np.divmod(row, size)
        number = turn * lanes + lane
        if self.shuffle:
            keys = mix(mix(number.astype(np.uint64)) ^ key(self.key, epoch, 1))
            within = permute(within, size, keys)
        return np.where(place < whole, number * size + within, place)

    def _laid_out(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The shards in the order of an epoch, and the places at which each ends."""
        order = shuffled(len(self.sizes), key(self.key, epoch, 2))
        return order, np.cumsum(self.sizes[order])


class _Mixture:
    """Sources from which a lane draws: for its sample number 0, 1, 2, … the source, and the number of the draw from it."""

    def __init__(
        self,
        phases: Sequence[Phase],
        share: int,
        lane: int,
        lanes: int,
        seed: int,
        shuffle: bool,
        stratified: bool,
    ):
        self._firsts = np.array([phase.first_step * share for phase in phases], np.int64)
        self._edges = [_edges(phase.proportions) for phase in phases]
        self._size = max(map(_block_size, phases))
        self._offset = lane * _ONE // lanes  # lanes round at different draws
        self._key, self._lane = key(seed, 3), lane
        self._random = shuffle and not stratified
        self._shift = lane * self._size // lanes
        self._block = functools.lru_cache(maxsize=3)(self._drawn)
        self._before: list[list[int]] = [[0] * len(phases[0].proportions)]
        for number, phase in enumerate(phases[1:]):
            drawn = phase.first_step * share - int(self._firsts[number])
            self._before.append(self._counts(number, drawn))

    def draws(self, drawn: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(source, number of the draw from it) of the lane's samples."""
        source, index = np.empty(drawn.shape, np.int64), np.empty(drawn.shape, np.int64)
        phase = np.searchsorted(self._firsts, drawn, side="right") - 1
        block, within = np.divmod(drawn - self._firsts[phase], self._size)
        for one, number in np.unique(np.stack([phase, block]), axis=1).T:
            here = (phase == one) & (block == number)
            sources, numbers = self._block(int(one), int(number))
            source[here], index[here] = sources[within[here]], numbers[within[here]]
        return source, index

    def counts(self, drawn: int) -> list[int]:
        """Draws from each source among the lane's first so many samples."""
        phase = int(np.searchsorted(self._firsts, drawn, side="right")) - 1
        return self._counts(phase, drawn - int(self._firsts[phase]))

    def _counts(self, phase: int, drawn: int) -> list[int]:
        block, rest = divmod(drawn, self._size)
        counts = self._until(phase, block)
        if rest:
            sources, _ = self._block(phase, block)
            for number, more in enumerate(np.bincount(sources[:rest], minlength=len(counts))):
                counts[number] += int(more)
        return counts

    def _until(self, phase: int, block: int) -> list[int]:
        """Draws from each source before a block."""
        edges = [(edge * block * self._size + self._offset) // _ONE for edge in self._edges[phase][1:-1]]
        edges = [0, *edges, block * self._size]
        return [before + high - low for before, low, high in zip(self._before[phase], edges, edges[1:], strict=False)]

    def _drawn(self, phase: int, block: int) -> tuple[np.ndarray, np.ndarray]:
        """Source and number of the draw from it, for each sample of a block."""
        begin, end = self._until(phase, block), self._until(phase, block + 1)
        counts = [high - low for low, high in zip(begin, end, strict=True)]
        source = np.repeat(np.arange(len(counts)), counts)
        numbers = np.concatenate([np.arange(count) for count in counts])
        if self._random:
            chosen = key(int(self._key), self._lane, phase, block)
            source = source[np.argsort(mix(np.arange(self._size).astype(np.uint64) ^ chosen), kind="stable")]
        else:
            source = source[np.argsort((numbers + 0.5) / np.repeat(counts, counts), kind="stable")]
            source = np.roll(source, self._shift)  # or all lanes would draw from one source at a time
        index = np.empty(self._size, np.int64)
        for number, first in enumerate(begin):
            here = source == number
            index[here] = first + np.arange(here.sum())
        return source, index


def _edges(proportions: Sequence[float]) -> list[int]:
    """Borders of the sources' shares of _ONE."""
    sums = np.cumsum(proportions, dtype=np.float64)
    return [0, *(round(float(edge) / float(sums[-1]) * _ONE) for edge in sums[:-1]), _ONE]


def _block_size(phase: Phase) -> int:
    """Samples of a block, a power of two: every source with a share has at least one in each."""
    edges = _edges(phase.proportions)
    least = min(high - low for low, high in itertools.pairwise(edges) if high > low)
    return max(_SMALLEST_BLOCK, 1 << (2 * _ONE // least).bit_length())
