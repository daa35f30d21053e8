"""Documents -> samples of fixed length: tokens are concatenated, each document closed by the end-of-document token."""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray


def pack(rest: NDArray, stream: NDArray, seq_len: int) -> tuple[NDArray, NDArray]:
    """Cut `rest` followed by `stream` into rows.

    rest: [fewer than seq_len] what earlier calls left over; stream: [n].
    Returns (samples [k, seq_len], rest [fewer than seq_len]).
    """
    joined = np.concatenate([rest, stream])
    whole = len(joined) // seq_len * seq_len
    return joined[:whole].reshape(-1, seq_len), joined[whole:].copy()


def is_held_out(name: str, seed: int, fraction: float) -> bool:
    """Whether the document goes to validation: a hash of seed and name, uniform in [0, 1), lies below `fraction`."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token id: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def bytes_per_token(text: str, offsets: list[tuple[int, int]]) -> NDArray[np.int64]:
    """How many UTF-8 bytes of `text` each token accounts for.

    offsets: (begin, end) in characters per token, as `tokenizers` gives them. Tokens that share one character (its
    bytes) count it once, at the first of them. Returns [len(offsets) + 1]; the last entry is what no token covers
    (nothing, for a lossless tokenizer), so that the sum is the length of the text.
    """
    ends = np.maximum.accumulate(np.array([0, *(end for _, end in offsets), len(text)], dtype=np.int64))
    if not text.isascii():
        widths = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        size = 1 + (widths >= 0x80).astype(np.int64) + (widths >= 0x800) + (widths >= 0x10000)
        ends = np.concatenate([[0], np.cumsum(size)])[ends]
    return np.diff(ends)
