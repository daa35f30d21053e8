"""Marks of single tokens, which shards of conversations hold beside them: what is trained, and where documents end.

While documents are packed, a token and its flags are one uint32, the flags in the highest bits.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

TRAINED, ENDS, UNDESIRABLE = 1, 2, 4
"""TRAINED: a label of the objectives `completion` and `preference`. ENDS: the last token of a document, and each token that fills a
sample. UNDESIRABLE: a token of an answer that is labelled so."""
_SHIFT = 29


def with_flags(ids: NDArray, flags: NDArray[np.uint8] | int) -> NDArray[np.uint32]:
    """Tokens and their flags as one number each. ids: below 2^29."""
    return np.asarray(ids, np.uint32) | (np.asarray(flags, np.uint32) << np.uint32(_SHIFT))


def without_flags(values: NDArray[np.uint32], dtype: str) -> tuple[NDArray, NDArray[np.uint8]]:
    """(tokens, flags) of such numbers."""
    return (values & np.uint32((1 << _SHIFT) - 1)).astype(dtype), (values >> np.uint32(_SHIFT)).astype(np.uint8)
