"""Tokenising renderings of conversations for the shards, with the flags of their tokens."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.samples import ChatSettings, Sample, SampleEncoder, rendering_of
from llmtrain.data.shards.packing import ENDS, TRAINED, with_flags
from llmtrain.data.sources.records import Pieces
from llmtrain.data.tokenize.encode import DocumentMarks, EncodedBatch, held_out


class ChatBatch(NamedTuple):
    """encoded: its ids have flags. cut: [p] tokens that did not fit a sample, of each conversation; useless: [p] conversations
    without a trained token, which are not to be stored."""

    encoded: EncodedBatch
    cut: NDArray[np.int64]
    useless: NDArray[np.bool_]


class ChatEncoder:
    """Callable that tokenises conversations, each cut to `seq_len` tokens. tokenizer: the content of a tokenizer.json."""

    def __init__(
        self, tokenizer: str, marks: DocumentMarks, settings: ChatSettings, seq_len: int, seed: int, fraction: float
    ) -> None:
        """seed, fraction: of the split into training and validation."""
        self._encode = SampleEncoder(tokenizer, marks, settings)
        self._seq_len, self._seed, self._fraction = seq_len, seed, fraction

    def __call__(self, batch: Sequence[Pieces]) -> ChatBatch:
        renderings = [rendering_of(text) for some in batch for text in some.texts]
        samples, size = self._encode(renderings), self._seq_len
        whole = np.array([len(one.ids) for one in samples], np.int64)
        tokens = np.minimum(whole, size)
        text_bytes = [len(one.text.encode()) for one in renderings]
        ids = [flagged(one, size) for one in samples]
        useless = np.array([not has_label(one, size) for one in samples], bool)
        held = held_out_of(batch, self._seed, self._fraction)
        return ChatBatch(encoded(held, tokens, text_bytes, ids), whole - tokens, useless)


def held_out_of(batch: Sequence[Pieces], seed: int, fraction: float) -> NDArray[np.bool_]:
    """Records of validation: [p], true for each of them."""
    return np.array([out for some in batch for out in held_out(some, seed, fraction)], bool)


def flagged(one: Sample, size: int, further: int = 0) -> NDArray[np.uint32]:
    """The first `size` tokens of a document with their flags. further: flags of each of them."""
    flags = one.trained[:size].astype(np.uint8) * np.uint8(TRAINED) | np.uint8(further)
    flags[-1:] |= ENDS
    return with_flags(one.ids[:size], flags)


def has_label(one: Sample, size: int) -> bool:
    """True if one of the first `size` tokens is trained. The first token of a document is no label."""
    return bool(one.trained[1:size].any())


def encoded(
    held: NDArray[np.bool_], tokens: NDArray[np.int64], text_bytes: Sequence[int], ids: Sequence[NDArray[np.uint32]]
) -> EncodedBatch:
    """Whole records, of which each ends. tokens, text_bytes: of each; ids: of all in order."""
    return EncodedBatch(
        held_out=held,
        ends=np.ones(len(tokens), bool),
        tokens=tokens,
        text_bytes=np.array(text_bytes, np.int64),
        ids=np.concatenate([np.zeros(0, np.uint32), *ids]),
        held_bytes=np.zeros(int(tokens[held].sum()), np.int64),
    )
