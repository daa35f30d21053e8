"""Packing documents into samples of fixed length: tokens are concatenated, with an end-of-document token after each document."""

import hashlib
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

TRAINED, ENDS, UNDESIRABLE = 1, 2, 4
"""Marks of single tokens, which shards of conversations hold beside them; while documents are packed, in the highest bits.

TRAINED: a label of the objectives `completion` and `preference`. ENDS: the last token of a document, and each token that fills a
sample. UNDESIRABLE: a token of an answer that is labelled so."""
_SHIFT = 29


def with_flags(ids: NDArray, flags: NDArray[np.uint8] | int) -> NDArray[np.uint32]:
    """Tokens and their flags as one number each. ids: below 2^29."""
    return np.asarray(ids, np.uint32) | (np.asarray(flags, np.uint32) << np.uint32(_SHIFT))


def without_flags(values: NDArray[np.uint32], dtype: str) -> tuple[NDArray, NDArray[np.uint8]]:
    """(tokens, flags) of such numbers."""
    return (values & np.uint32((1 << _SHIFT) - 1)).astype(dtype), (values >> np.uint32(_SHIFT)).astype(np.uint8)


def pack(rest: NDArray, stream: NDArray, seq_len: int) -> tuple[NDArray, NDArray]:
    """Cut `rest` followed by `stream` into rows.

    rest: [fewer than seq_len], the remainder of earlier calls; stream: [n].
    Returns (samples [k, seq_len], remainder [fewer than seq_len]).
    """
    joined = np.concatenate([rest, stream])
    whole = len(joined) // seq_len * seq_len
    return joined[:whole].reshape(-1, seq_len), joined[whole:].copy()


def document_ends(tokens: NDArray, eod_id: int, begins: bool | None = None) -> NDArray[np.bool_]:
    """True at the tokens that end a document. tokens: [..., seq_len], each sequence by itself.

    begins: documents begin with the end-of-document token too (BOS = EOS): then one between another, or the sequence's start, and
    text opens a document. None: unknown; True of a sequence where text follows such a pair, and never a lone one.
    """
    ends = tokens == eod_id
    if begins is False:
        return ends
    behind = np.ones_like(ends)
    behind[..., 1:] = ends[..., :-1]
    before_text = np.zeros_like(ends)
    before_text[..., :-1] = ends[..., :-1] & ~ends[..., 1:]
    opens = before_text & behind
    if begins is None:
        opens &= (opens[..., 1:].any(-1) & ~(before_text & ~behind).any(-1))[..., None]
    return ends & ~opens


def is_held_out(name: str, seed: int, fraction: float) -> bool:
    """Return True for documents of the validation split: a hash of seed and name, uniform in [0, 1), is below `fraction`."""
    digest = hashlib.blake2b(f"{seed}\0{name}".encode("utf-8", "surrogateescape"), digest_size=8).digest()
    return int.from_bytes(digest, "little") < fraction * 2**64


def are_held_out(file: str, places: Iterable[int], seed: int, fraction: float) -> list[bool]:
    """is_held_out of the documents FILE@PLACE."""
    begun = hashlib.blake2b(f"{seed}\0{file}@".encode("utf-8", "surrogateescape"), digest_size=8)
    limit, found = fraction * 2**64, []
    for place in places:
        hashed = begun.copy()
        hashed.update(b"%d" % place)
        found.append(int.from_bytes(hashed.digest(), "little") < limit)
    return found


def token_dtype(vocab_size: int) -> str:
    """The smallest type that holds every token id: uint16 or uint32."""
    return "uint16" if vocab_size <= 1 << 16 else "uint32"


def bytes_per_token(text: str, offsets: list[tuple[int, int]]) -> NDArray[np.int64]:
    """UTF-8 bytes of `text` that each token stands for.

    offsets: (begin, end) in characters per token, as `tokenizers` returns them. A character that several tokens share (byte
    tokens) counts for the first of them. Returns [len(offsets) + 1]; the last entry is the text without a token (0 for a
    lossless tokenizer), so that the sum is the length of the text.
    """
    ends = np.maximum.accumulate(np.array([0, *(end for _, end in offsets), len(text)], dtype=np.int64))
    if not text.isascii():
        widths = np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)
        size = 1 + (widths >= 0x80).astype(np.int64) + (widths >= 0x800) + (widths >= 0x10000)
        ends = np.concatenate([[0], np.cumsum(size)])[ends]
    return np.diff(ends)
