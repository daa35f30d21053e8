"""Tokenising pieces of documents. Imports neither torch nor transformers."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.packing import bytes_per_token, is_held_out, token_dtype
from llmtrain.data.records import DocumentPiece

LONGEST_TEXT = 2 << 20
"""Characters that are tokenised together. `tokenizers` needs some 40 bytes of memory for each; a longer piece is cut between two
words, or where it has none, anywhere."""
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


class Encoder:
    """Callable that tokenises pieces. tokenizer: the content of a tokenizer.json."""

    def __init__(self, tokenizer: str, eod_id: int, seed: int, validation_fraction: float) -> None:
        self.eod_id, self.seed, self.validation_fraction = eod_id, seed, validation_fraction
        self.tokenizer = Tokenizer.from_str(tokenizer)
        self.tokenizer.encode_special_tokens = True  # not stored in tokenizer.json; see make_tokenizer
        self.dtype = token_dtype(max(self.tokenizer.get_vocab(with_added_tokens=True).values()) + 1)

    def is_held_out(self, piece: DocumentPiece) -> bool:
        return is_held_out(piece.name, self.seed, self.validation_fraction)

    def __call__(self, pieces: Sequence[DocumentPiece]) -> EncodedBatch:
        held = [self.is_held_out(piece) for piece in pieces]
        train = self._encode_fast([piece.text for piece, out in zip(pieces, held, strict=True) if not out])
        end = np.array([self.eod_id], self.dtype)
        ids: list[NDArray] = [np.zeros(0, self.dtype)]
        held_bytes: list[NDArray[np.int64]] = [np.zeros(0, np.int64)]
        tokens = []
        for piece, out in zip(pieces, held, strict=True):
            count = len(ids)
            if out:
                for text, sizes in self._encode_with_bytes(piece):
                    ids.append(text)
                    held_bytes.append(sizes)
            else:
                ids += next(train)
            ids += [end] * piece.ends
            tokens.append(sum(map(len, ids[count:])))
        return EncodedBatch(
            held_out=np.array(held, dtype=bool),
            ends=np.array([piece.ends for piece in pieces], dtype=bool),
            tokens=np.array(tokens, dtype=np.int64),
            text_bytes=np.array([len(piece.text.encode()) for piece in pieces], dtype=np.int64),
            ids=np.concatenate(ids),
            held_bytes=np.concatenate(held_bytes),
        )

    def _encode_fast(self, texts: list[str]) -> Iterator[list[NDArray]]:
        """The tokens of each text, in parts. At most LONGEST_TEXT characters are encoded at a time, or two texts more."""
        waiting: list[tuple[int, str]] = [(at, part) for at, text in enumerate(texts) for part in cut_text(text)]
        done: list[NDArray] = []
        current = 0
        for group in _groups(waiting):
            encodings = self.tokenizer.encode_batch_fast([part for _, part in group], add_special_tokens=False)
            for (at, _), encoding in zip(group, encodings, strict=True):
                if at != current:
                    yield done
                    done, current = [], at
                done.append(np.array(encoding.ids, self.dtype))
        yield done

    def _encode_with_bytes(self, piece: DocumentPiece) -> Iterator[tuple[NDArray, NDArray[np.int64]]]:
        """Tokens of a held-out piece, and the bytes of each; the end-of-document token's too, if it ends a document.

        Text that no token covers counts for that token, or else for the last one.
        """
        parts = list(cut_text(piece.text))
        for number, text in enumerate(parts, 1):
            encoding = self.tokenizer.encode(text, add_special_tokens=False)  # encode_batch_fast() returns no offsets
            sizes = bytes_per_token(text, encoding.offsets)
            if not (piece.ends and number == len(parts)):
                if len(sizes) > 1:
                    sizes[-2] += sizes[-1]
                sizes = sizes[:-1]
            yield np.array(encoding.ids, self.dtype), sizes


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


def _groups(parts: list[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    size = 0
    for part in parts:
        group.append(part)
        size += len(part[1])
        if size >= LONGEST_TEXT:
            yield group
            group, size = [], 0
    if group:
        yield group
