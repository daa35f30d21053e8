"""Tokenising pieces of documents. Imports neither torch nor transformers."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.engine_choice import EngineChoice, ProvedEngine
from llmtrain.data.packing import is_held_out
from llmtrain.data.records import DocumentPiece

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
        self.engine = ProvedEngine(tokenizer, choice or EngineChoice())

    def is_held_out(self, piece: DocumentPiece) -> bool:
        return is_held_out(piece.name, self.seed, self.validation_fraction)

    def __call__(self, pieces: Sequence[DocumentPiece]) -> EncodedBatch:
        held = [self.is_held_out(piece) for piece in pieces]
        parts = [[part.encode() for part in cut_text(piece.text)] for piece in pieces]
        encoded = self.engine.encode([text for texts in parts for text in texts])
        ids: list[NDArray] = []
        held_bytes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        tokens = []
        for piece, texts, out in zip(pieces, parts, held, strict=True):
            own = list(itertools.islice(encoded, len(texts)))
            if out:
                held_bytes += self._sizes(piece, texts, own)
            dtype = own[0].dtype
            if piece.begins and self.marks.bos_id is not None:
                own.insert(0, np.array([self.marks.bos_id], dtype))
            own += [np.array([self.marks.eod_id], dtype)] * (piece.ends and self.marks.closes)
            ids += own
            tokens.append(sum(map(len, own)))
        return EncodedBatch(
            held_out=np.array(held, dtype=bool),
            ends=np.array([piece.ends for piece in pieces], dtype=bool),
            tokens=np.array(tokens, dtype=np.int64),
            text_bytes=np.array([sum(map(len, texts)) for texts in parts], dtype=np.int64),
            ids=np.concatenate(ids),
            held_bytes=np.concatenate(held_bytes),
        )

    def _sizes(
        self, piece: DocumentPiece, texts: Sequence[bytes], ids: Sequence[NDArray]
    ) -> Iterator[NDArray[np.int64]]:
        """Bytes of text behind the tokens of a held-out piece; behind the end-of-document token too, if it ends a document.

        Text that no token covers counts for that token, or else for the last one.
        """
        if piece.begins and self.marks.bos_id is not None:
            yield np.zeros(1, np.int64)
        for number, (text, tokens) in enumerate(zip(texts, ids, strict=True), 1):
            sizes = self.engine.sizes(tokens, text)
            if not (piece.ends and self.marks.closes and number == len(texts)):
                if len(sizes) > 1:
                    sizes[-2] += sizes[-1]
                sizes = sizes[:-1]
            yield sizes


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
