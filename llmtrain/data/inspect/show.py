"""A sample as text, with the borders of its documents marked."""

import itertools
import re
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.inspect.sample_documents import SourceDocument
from llmtrain.data.shards.packing import ENDS, TRAINED, document_ends
from llmtrain.data.tokenize.tokenizer import TextTokenizer

_BORDER, _SPECIAL, _TRAINED, _PLAIN = "\x1b[36m", "\x1b[33m", "\x1b[32m", "\x1b[0m"
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters by which a text could steer the terminal."""


def printable(text: str) -> str:
    """The text, with characters written out that would steer a terminal."""
    return _CONTROL.sub(lambda found: ascii(found[0])[1:-1], text)


class SampleView:
    """Lines for samples. tokenizer: None shows numbers; begins: see document_ends; colour: for a terminal."""

    def __init__(self, tokenizer: TextTokenizer | None, begins: bool | None, colour: bool):
        self._tokenizer, self._begins, self._colour = tokenizer, begins, colour
        self._eod_id = tokenizer.eod_id if tokenizer else None

    def lines(
        self,
        title: str,
        tokens: NDArray,
        documents: Sequence[SourceDocument] | None,
        flags: NDArray[np.uint8] | None = None,
    ) -> Iterator[str]:
        """A title, then each document: where it is from and which tokens it has, its text, and the token that ends it.

        documents: None where they were not recorded: then the tokens that end documents divide the sample. flags: of the tokens of
        conversations: trained ones are in ⟦ ⟧, or coloured.
        """
        parts = self._parts(tokens, documents)
        padding = self._padding(tokens, documents)
        if flags is not None and not documents:
            ends = np.flatnonzero(flags & ENDS)
            padding = max(int(np.argmin(np.diff(ends[::-1], append=-1) == -1)), 0)  # each token of it ends a document
            borders = [0, *(ends[: len(ends) - padding] + 1).tolist()]
            parts = [(low, high, "") for low, high in itertools.pairwise(borders)]
        kinds = [f"{len(tokens):,} tokens", f"{len(parts):,} document{'s' * (len(parts) != 1)}"]
        kinds += [f"{padding:,} of padding"] if padding else []
        kinds += [f"{np.count_nonzero(flags & TRAINED):,} trained"] if flags is not None else []
        yield self._paint(_BORDER, f"━━ {title}: {', '.join(kinds)}")
        for begin, end, about in parts:
            yield self._paint(_BORDER, f"── {about}tokens {begin}–{end - 1}")
            yield from (
                self._text(tokens[begin:end]) if flags is None else self._chat(tokens[begin:end], flags[begin:end])
            )
        if padding:
            yield self._paint(_BORDER, f"── padding: tokens {len(tokens) - padding}–{len(tokens) - 1}")

    def _padding(self, tokens: NDArray, documents: Sequence[SourceDocument] | None) -> int:
        """End-of-document tokens at the end of a sample that end no document; what lies behind its last one."""
        if documents:
            return len(tokens) - documents[-1].end
        if self._eod_id is None or not len(tokens) or tokens[-1] != self._eod_id:
            return 0
        other = np.flatnonzero(tokens != self._eod_id)
        run = len(tokens) - (int(other[-1]) + 1 if len(other) else 0)
        return run - 1 if len(other) else run

    def _parts(self, tokens: NDArray, documents: Sequence[SourceDocument] | None) -> list[tuple[int, int, str]]:
        if documents:
            before = ", goes on from before"
            return [(one.begin, one.end, f"{printable(str(one))}{'' if one.first else before}, ") for one in documents]
        end = len(tokens) - self._padding(tokens, None)
        if self._eod_id is None:
            return [(0, end, "")] if end else []
        ends = (np.flatnonzero(document_ends(tokens[:end], self._eod_id, self._begins)) + 1).tolist()
        borders = [0, *ends] if ends and ends[-1] == end else [0, *ends, end]
        return [(low, high, "") for low, high in itertools.pairwise(borders) if low < high]

    def _text(self, tokens: NDArray) -> Iterator[str]:
        ids = tokens.tolist()
        ends = len(ids) > 0 and ids[-1] == self._eod_id
        body = ids[:-1] if ends else ids
        if self._tokenizer is None:
            text = " ".join(map(str, body))
        else:
            text = printable(self._tokenizer.decode(body))
        yield from text.split("\n") if text else ()
        if ends:
            yield self._paint(_SPECIAL, self._tokenizer.eod_token if self._tokenizer else str(ids[-1]))

    def _chat(self, tokens: NDArray, flags: NDArray[np.uint8]) -> Iterator[str]:
        """The text of a conversation with its trained tokens marked."""
        trained = (flags & TRAINED) != 0
        borders = [0, *(np.flatnonzero(np.diff(trained)) + 1).tolist(), len(tokens)]
        text = ""
        for low, high in itertools.pairwise(borders):
            ids = tokens[low:high].tolist()
            part = printable(self._tokenizer.decode(ids)) if self._tokenizer else " ".join(map(str, ids))
            if trained[low]:
                part = f"{_TRAINED}{part}{_PLAIN}" if self._colour else f"⟦{part}⟧"
            text += part if self._tokenizer or not text else f" {part}"
        yield from text.split("\n")

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{_PLAIN}" if self._colour else text
