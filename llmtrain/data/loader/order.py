"""The order of a run's samples, computed where it is read: any position in microseconds, with no memory per sample. No torch here.

A run reads positions 0, 1, 2, …; each global batch is `global_batch` of them. A batch is dealt evenly to the canonical nodes, lanes
that never exchange data: a machine reads the lanes of its ranks and needs only their shards. `SampleOrder.ids` says which sample
stands at a position; it knows nothing of ranks or workers, so that they cannot change the order.

Each source is read epoch by epoch without replacement. In every epoch its shards are laid out in a new random order, windows of
that sequence are dealt to the lanes in turn, and samples are shuffled within each window: a machine needs the shards of a window
or two of each of its lanes at a time. A small source is shuffled as a whole.

Where several sources are mixed, each lane draws from them as `data/loader/mixture_blocks.py` says. Draws of a small source are
numbered over all lanes: after any step, no sample of it was read twice before all were read once. Of a large one each lane reads
its own windows, so that lanes may be a few samples apart where an epoch of it ends.
"""

import functools
import math
from collections.abc import Sequence

import numpy as np

from llmtrain.data.loader.mixture_blocks import MixtureBlocks, Phase
from llmtrain.data.loader.permutation import key, mix, permute, shuffled

_LARGEST_WINDOW = 1 << 18
_SMALLEST_WINDOW = 1 << 8
_WINDOWS_PER_LANE = 64
"""Windows that a lane has at least in an epoch: two of them are a small part of a source's shards."""


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
        self._share = global_batch // self.lanes
        self._mixture = (
            MixtureBlocks(phases, self._share, self.lanes, seed, even=stratified or not shuffle)
            if len(sources) > 1
            else None
        )

    def ids(self, positions: np.ndarray) -> np.ndarray:
        """Sample ids at these positions. int64, of the same shape."""
        positions = np.asarray(positions, np.int64)
        step, slot = np.divmod(positions, self.global_batch)
        lane, within = np.divmod(slot, self._share)
        drawn = step * self._share + within  # samples of its lane before it
        if self._mixture is None:
            return self._sources[0].ids(drawn * self.lanes + lane)
        source, of_lane, of_all = self._mixture.draws(lane, drawn)
        result = np.empty(positions.shape, np.int64)
        for number in np.unique(source):
            here = source == number
            one = self._sources[number]
            result[here] = one.ids(of_all[here] if one.is_small else of_lane[here] * self.lanes + lane[here])
        return result

    def counts(self, steps: int) -> list[int]:
        """Samples of each source in the first so many steps."""
        drawn = steps * self._share
        return [drawn * self.lanes] if self._mixture is None else self._mixture.counts(drawn)


class _Source:
    """Order of one source: index y = 0, 1, 2, … over all epochs. Lane c reads y = c, c + lanes, c + 2 lanes, …"""

    def __init__(self, sizes: np.ndarray, begin: int, lanes: int, chosen: np.uint64, shuffle: bool, window: int | None):
        self.sizes, self.begin, self.lanes, self.key, self.shuffle = sizes, begin, lanes, int(chosen), shuffle
        self.samples = int(sizes.sum())
        self.window = window or min(_LARGEST_WINDOW, self.samples // (_WINDOWS_PER_LANE * lanes))
        self.is_small = window is None and self.window < _SMALLEST_WINDOW
        if shuffle and self.is_small:
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
