"""Pseudo-random permutations that are computed element by element, with no memory and the same on every machine. No torch here.

A Feistel network permutes the whole numbers below a power of four; what falls outside of the wanted range is permuted again
until it falls inside ("cycle walking", Black and Rogaway 2002).
"""

import numpy as np

_ROUNDS = 6
_GAMMA, _M1, _M2 = (np.uint64(number) for number in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def mix(values: np.ndarray) -> np.ndarray:
    """64 well-mixed bits of each uint64: the finalizer of SplitMix64 (Steele, Lea and Flood 2014)."""
    values = (values + _GAMMA).astype(np.uint64)
    values = (values ^ (values >> np.uint64(30))) * _M1
    values = (values ^ (values >> np.uint64(27))) * _M2
    return values ^ (values >> np.uint64(31))


def key(*parts: int) -> np.uint64:
    """A key that depends on every part and on their order."""
    state = np.zeros(1, np.uint64)
    for part in parts:
        state = mix(state ^ np.uint64(part & 0xFFFFFFFFFFFFFFFF))
    return state[0]


def permute(values: np.ndarray, size: int, keys: np.ndarray | np.uint64) -> np.ndarray:
    """Images of `values`, whole numbers below `size`, under the permutation of range(size) that a key chooses.

    keys: one for all values, or one for each. Returns int64 of the same shape.
    """
    half = np.uint64(max((size - 1).bit_length() + 1, 2) // 2)
    mask = np.uint64((1 << int(half)) - 1)
    result = np.asarray(values).astype(np.uint64)
    keys = np.broadcast_to(np.asarray(keys, np.uint64), result.shape)
    left = np.ones(result.shape, bool)  # to permute, or to permute again
    while left.any():
        some, chosen = result[left], keys[left]
        high, low = some >> half, some & mask
        for number in range(_ROUNDS):
            high, low = low, high ^ (mix(low ^ mix(chosen + np.uint64(number))) & mask)
        result[left] = high << half | low
        left &= result >= np.uint64(size)
    return result.astype(np.int64)


def shuffled(size: int, chosen: np.uint64) -> np.ndarray:
    """A permutation of range(size), all of it: for what is small. int64 [size]."""
    return permute(np.arange(size), size, chosen)
