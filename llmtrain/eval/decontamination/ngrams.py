"""Set of n-grams of token ids, and search for its members in a stream of tokens. Memory: the n-grams of the set."""

import numpy as np
from numpy.typing import NDArray

_ROOT = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64's finaliser (Steele et al. 2014), a hash of 64-bit integers."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def ngram_hashes(ids: NDArray, n: int) -> NDArray[np.uint64]:
    """64-bit hashes of the windows of n tokens. ids: [t] -> [max(t - n + 1, 0)]

    A false match has a chance of (set's n-grams x stream's tokens) / 2^64: one in 700 for a million against 26 billion.
    """
    count = len(ids) - n + 1
    if count <= 0:
        return np.zeros(0, np.uint64)
    mixed = _mix(ids.astype(np.uint64) + _ROOT)
    total = np.zeros(count, np.uint64)
    for i in range(n):
        total *= _ROOT
        total += mixed[i : i + count]
    return _mix(total)


class NgramSet:
    """Set of n-gram hashes. hashes: sorted, each once."""

    def __init__(self, hashes: NDArray[np.uint64]):
        self.hashes = np.unique(hashes)
        # Most windows of the stream are not in the set: a table of hash prefixes filters them before the binary search.
        bits = max(16, int(np.ceil(np.log2(max(len(self.hashes), 1)))) + 4)
        self._mask = np.uint64((1 << bits) - 1)
        self._table = np.zeros(1 << bits, bool)
        self._table[self.hashes & self._mask] = True

    def find(self, hashes: NDArray[np.uint64]) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """(positions in `hashes`, indices in self.hashes) of all hashes that are in the set."""
        positions = np.flatnonzero(self._table[hashes & self._mask])
        if not len(positions) or not len(self.hashes):
            return np.zeros(0, np.intp), np.zeros(0, np.intp)
        wanted = hashes[positions]
        members = np.minimum(np.searchsorted(self.hashes, wanted), len(self.hashes) - 1)
        equal = self.hashes[members] == wanted
        return positions[equal], members[equal]
