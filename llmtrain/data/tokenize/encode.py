"""Tokenising pieces of documents. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.shards.packing import are_held_out, is_held_out
from llmtrain.data.sources.records import Pieces
from llmtrain.data.tokenize.engine_choice import EngineChoice, VerifiedTokenizer

LONGEST_TEXT = 2 << 20
"""Characters of a text that are tokenised together. `tokenizers` needs some 40 bytes of memory for each; a longer piece is cut
between two words, or where it has none, anywhere."""
_BETWEEN_WORDS = re.compile(r"(?<=\w) (?=\w)")
_LONGEST_WORD = 4096


@dataclass(frozen=True)
class EncodedBatch:
    """Pieces of documents in order; all arrays over pieces have the same length [p].

    ids: [n] tokens of all pieces, one after the other, documents closed by the end-of-document token.
    held_bytes: [m] UTF-8 bytes of text per token, for the tokens of held-out pieces only.
    """

    held_out: NDArray[np.bool_]
    ends: NDArray[np.bool_]
    tokens: NDArray[np.int64]
    text_bytes: NDArray[np.int64]
    ids: NDArray
    held_bytes: NDArray[np.int64]

    def ids_of(self, held_out: bool) -> NDArray:
        """The tokens of the pieces that are held out, or of the others."""
        borders = np.flatnonzero(np.diff(self.held_out)) + 1
        begins = np.concatenate([[0], np.cumsum(self.tokens)])[[0, *borders, len(self.tokens)]]
        first = int(self.held_out[0] != held_out) if len(self.held_out) else 0
        runs = [self.ids[begin:end] for begin, end in zip(begins[first:-1:2], begins[first + 1 :: 2], strict=True)]
        return runs[0] if len(runs) == 1 else np.concatenate([self.ids[:0], *runs])

    def select(self, chosen: NDArray[np.bool_]) -> EncodedBatch:
        """The batch of some of the pieces. chosen: [p]."""
        held = np.repeat(chosen[self.held_out], self.tokens[self.held_out])
        return EncodedBatch(
            self.held_out[chosen],
            self.ends[chosen],
            self.tokens[chosen],
            self.text_bytes[chosen],
            self.ids[np.repeat(chosen, self.tokens)],
            self.held_bytes[held],
        )


@dataclass(frozen=True)
class DocumentMarks:
    """Tokens around each document. bos_id: begins it; eod_id: the tokenizer's end-of-document token, which ends it if `closes`."""

    eod_id: int
    bos_id: int | None = None
    closes: bool = True


def held_out(some: Pieces, seed: int, fraction: float) -> list[bool]:
    """True for each piece of the validation split."""
    if not fraction:
        return [False] * len(some.texts)
    if some.places is None:
        return [is_held_out(some.file, seed, fraction)] * len(some.texts)
    return are_held_out(some.file, some.places, seed, fraction)


class Encoder:
    """Callable that tokenises pieces. tokenizer: the content of a tokenizer.json."""

    def __init__(
        self,
        tokenizer: str,
        marks: DocumentMarks,
        seed: int,
        validation_fraction: float,
        choice: EngineChoice | None = None,
    ) -> None:
        self.marks, self.seed, self.validation_fraction = marks, seed, validation_fraction
        self.engine = VerifiedTokenizer(tokenizer, choice or EngineChoice())

    def __call__(self, batch: Sequence[Pieces]) -> EncodedBatch:
        counts = [len(some.texts) for some in batch]
        texts = [text for some in batch for text in some.texts]
        begins, ends = np.repeat(np.array([(some.begins, some.ends) for some in batch], bool), counts, axis=0).T
        held = np.array([out for some in batch for out in held_out(some, self.seed, self.validation_fraction)], bool)
        parts = _Parts(texts, begins & (self.marks.bos_id is not None), ends & self.marks.closes)
        encoded = list(self.engine.encode(parts.texts))
        arrays, tokens = self._marked(encoded, parts)
        held_bytes = [self._sizes(encoded[number], parts, number) for number in np.flatnonzero(held[parts.of])]
        return EncodedBatch(
            held_out=held,
            ends=ends,
            tokens=parts.sums(tokens),
            text_bytes=np.array([len(text) if text.isascii() else len(text.encode()) for text in texts], np.int64),
            ids=np.concatenate(
                arrays, dtype=self.engine.dtype, casting="unsafe"
            ),  # narrower than the engine's, in one pass
            held_bytes=np.concatenate([np.zeros(0, np.int64), *held_bytes]),
        )

    def _marked(self, encoded: list[NDArray], parts: _Parts) -> tuple[list[NDArray], NDArray[np.int64]]:
        """The tokens of each part with those that begin and end its document, and the number of all of them."""
        bos, end, none = (np.array(ids, np.uint32) for ids in ([self.marks.bos_id or 0], [self.marks.eod_id], []))
        columns = [encoded]
        if parts.begins.any():
            columns.insert(0, [bos if begins else none for begins in parts.begins.tolist()])
        if parts.ends.any():
            columns.append([end if ends else none for ends in parts.ends.tolist()])
        arrays = encoded * len(columns)
        for number, column in enumerate(columns):
            arrays[number :: len(columns)] = column
        return arrays, np.fromiter(map(len, encoded), np.int64, len(encoded)) + parts.begins + parts.ends

    def _sizes(self, ids: NDArray, parts: _Parts, number: int) -> NDArray[np.int64]:
        """Bytes of text behind the tokens of a part of a held-out text; behind those that begin and end its document too.

        Text that no token covers counts for the end-of-document token, or else for the last one.
        """
        sizes = self.engine.sizes(ids, parts.texts[number])
        if not parts.ends[number]:
            if len(sizes) > 1:
                sizes[-2] += sizes[-1]
            sizes = sizes[:-1]
        return np.concatenate([np.zeros(1, np.int64), sizes]) if parts.begins[number] else sizes


class _Parts:
    """Parts of texts that are tokenised one by one: the texts themselves, but of those longer than LONGEST_TEXT.

    begins, ends: whether a document is marked to begin or end there, of the texts when made, and then of the parts. of: number of
    the text of each part.
    """

    def __init__(self, texts: list[str], begins: NDArray[np.bool_], ends: NDArray[np.bool_]) -> None:
        self.texts, self.begins, self.ends, self._firsts = texts, begins, ends, np.arange(len(texts))
        if max(map(len, texts)) > LONGEST_TEXT:
            cut = [list(cut_text(text)) for text in texts]
            counts = np.array(list(map(len, cut)))
            self.texts = [part for parts in cut for part in parts]
            self._firsts = np.cumsum(counts) - counts
            self.begins, self.ends = np.zeros((2, len(self.texts)), bool)
            self.begins[self._firsts], self.ends[self._firsts + counts - 1] = begins, ends
        self.of = np.repeat(np.arange(len(texts)), np.diff(self._firsts, append=len(self.texts)))

    def sums(self, values: NDArray[np.int64]) -> NDArray[np.int64]:
        """Sums over the parts of each text."""
        return np.add.reduceat(values, self._firsts)


def cut_text(text: str) -> Iterator[str]:
    """Parts of a text of at most LONGEST_TEXT characters, cut before the space of the last word that fits."""
    begin = 0
    while len(text) - begin > LONGEST_TEXT:
        end = begin + LONGEST_TEXT
        spaces = [match.start() for match in _BETWEEN_WORDS.finditer(text, end - _LONGEST_WORD, end)]
        end = spaces[-1] if spaces else end
        yield text[begin:end]
        begin = end
    yield text[begin:] if begin else text
