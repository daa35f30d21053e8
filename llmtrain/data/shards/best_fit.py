"""Best-fit packing: whole documents laid into samples so that little is cut and little is padded.

A document longer than a sample is cut into full samples and a rest. The rests, the longest first, each go to the sample with the
least room that suffices (Ding et al. 2024, "Fewer Truncations Improve Language Modeling"). What stays empty is filled with
end-of-document tokens, which are no labels where documents are masked.
"""

import functools
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

WINDOW_TOKENS = 1 << 24
"""Tokens that are laid out together: memory for them, and for their bytes in validation."""


@dataclass(frozen=True)
class Layout:
    """Parts of documents in the order in which they lie in samples; all int64 [parts]. documents: number of the document in its
    split of a partition, or -1 for padding; begins: the part's first token in its document; tokens: its length."""

    documents: NDArray[np.int64]
    begins: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @functools.cached_property
    def ends(self) -> NDArray[np.int64]:
        """Tokens of the samples up to the end of each part."""
        return np.cumsum(self.tokens)


def best_fit(lengths: NDArray[np.int64], size: int) -> list[list[int]]:
    """Divide items into bins of at most `size`: the longest first, each into the fullest bin that it fits.

    lengths: each from 1 to `size`. Returns the numbers of the items of each bin.
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(size)]
    rooms = 0  # bit r: there is a bin with room r
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            chosen = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
            bins[chosen].append(item)
        else:
            room, chosen = size, len(bins)
            bins.append([item])
        if room := room - length:
            by_room[room].append(chosen)
            rooms |= 1 << room
    return bins


class BestFitPacker:
    """Packer of one split of a partition. pad_id: the end-of-document token; it also closes a document that the partition cuts."""

    def __init__(self, seq_len: int, pad_id: int, dtype: str, has_bytes: bool, alone: bool = False) -> None:
        self._alone = alone
        self._seq_len, self._pad_id, self._dtype, self._has_bytes = seq_len, pad_id, dtype, has_bytes
        self._ids: list[NDArray] = []
        self._bytes: list[NDArray[np.int64]] = []
        self._lengths: list[int] = []
        """Of the documents that have ended."""
        self._open = self._waiting = self._documents = 0
        self._layouts: list[Layout] = []
        self.padding = 0

    def add(
        self, ids: NDArray, token_bytes: NDArray[np.int64], tokens: NDArray[np.int64], ends: NDArray[np.bool_]
    ) -> tuple[NDArray, NDArray[np.int64]] | None:
        """Take pieces of documents; tokens, ends: of each piece. Returns samples and the bytes behind their tokens, both
        [samples, seq_len], once enough documents are there."""
        self._ids.append(ids)
        self._bytes.append(token_bytes)
        for count, end in zip(tokens.tolist(), ends.tolist(), strict=True):
            self._open += count
            if end:
                self._lengths.append(self._open)
                self._open = 0
        self._waiting += len(ids)
        return self._lay_out() if self._waiting - self._open >= WINDOW_TOKENS else None

    def finish(self) -> tuple[NDArray, NDArray[np.int64]]:
        """Samples of what is left."""
        if self._open:
            self.add(
                np.array([self._pad_id], self._dtype),
                np.zeros(int(self._has_bytes), np.int64),
                np.array([1]),
                np.array([True]),
            )
        return self._lay_out()

    def layout(self) -> Layout:
        """Layout of all samples."""
        return Layout(
            *(
                np.concatenate([np.zeros(0, np.int64), *(getattr(one, name) for one in self._layouts)])
                for name in ("documents", "begins", "tokens")
            )
        )

    def _lay_out(self) -> tuple[NDArray, NDArray[np.int64]]:
        size = self._seq_len
        ids = np.concatenate([np.zeros(0, self._dtype), *self._ids])
        sizes = np.concatenate([np.zeros(0, np.int64), *self._bytes])
        lengths = np.array(self._lengths, np.int64)
        whole = int(lengths.sum())
        counts = -(-lengths // size)  # parts of each document
        document = np.repeat(np.arange(len(lengths)), counts)
        begin = (np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)) * size
        part = np.minimum(lengths[document] - begin, size)
        bins = [[number] for number in range(len(part))] if self._alone else best_fit(part, size)
        bins = sorted((sorted(one) for one in bins), key=lambda one: one[0])
        order = np.array([item for one in bins for item in one], np.int64)
        row = np.repeat(np.arange(len(bins)), [len(one) for one in bins])
        ends = np.cumsum(part[order])
        filled = np.bincount(row, part[order], len(bins)).astype(np.int64)
        within = ends - part[order] - (np.cumsum(filled) - filled)[row] if len(bins) else ends
        target = np.empty(len(part), np.int64)  # where each part begins among the samples' tokens
        target[order] = row * size + within
        place = np.repeat(target - (np.cumsum(part) - part), part) + np.arange(whole)
        samples = np.full(len(bins) * size, self._pad_id, self._dtype)
        samples[place] = ids[:whole]
        of_bytes = np.zeros(len(samples) if self._has_bytes else 0, np.int64)
        if self._has_bytes:
            of_bytes[place] = sizes[:whole]
        self._note(document[order] + self._documents, begin[order], part[order], row, size - filled)
        self._documents += len(lengths)
        self._ids, self._bytes = [ids[whole:]], [sizes[whole:]]
        self._lengths, self._waiting = [], len(ids) - whole
        return samples.reshape(-1, size), of_bytes.reshape(-1, size)

    def _note(
        self,
        documents: NDArray[np.int64],
        begins: NDArray[np.int64],
        tokens: NDArray[np.int64],
        row: NDArray[np.int64],
        empty: NDArray[np.int64],
    ) -> None:
        """Note a layout, with the padding behind each row that has some. row: of each part; empty: of each row."""
        self.padding += int(empty.sum())
        padded = np.flatnonzero(empty)
        at = np.searchsorted(row, padded, side="right")
        self._layouts.append(
            Layout(np.insert(documents, at, -1), np.insert(begins, at, 0), np.insert(tokens, at, empty[padded]))
        )
