"""Tokenising renderings of conversations for the shards, with the flags of their tokens."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from llmtrain.data.chat.samples import ChatSettings, SampleEncoder, rendering_of
from llmtrain.data.shards.token_flags import ENDS, TRAINED, with_flags
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
        samples = self._encode(renderings)
        size = self._seq_len
        whole = np.array([len(one.ids) for one in samples], np.int64)
        ids = [np.zeros(0, np.uint32)]
        for one in samples:
            flags = one.trained[:size].astype(np.uint8) * np.uint8(TRAINED)
            flags[-1:] |= ENDS
            ids.append(with_flags(one.ids[:size], flags))
        held = np.array(
            list(itertools.chain.from_iterable(held_out(some, self._seed, self._fraction) for some in batch))
        )
        tokens = np.minimum(whole, size)
        encoded = EncodedBatch(
            held_out=held.astype(bool),
            ends=np.ones(len(samples), bool),
            tokens=tokens,
            text_bytes=np.array([len(one.text.encode()) for one in renderings], np.int64),
            ids=np.concatenate(ids),
            held_bytes=np.zeros(int(tokens[held.astype(bool)].sum()), np.int64),
        )
        # The first token of a document is no label.
        useless = np.array([not one.trained[1:size].any() for one in samples], bool)
        return ChatBatch(encoded, whole - tokens, useless)
