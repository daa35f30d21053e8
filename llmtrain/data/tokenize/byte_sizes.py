"""Bytes of text behind each token, from the vocabulary rather than from offsets, which only `tokenizers` gives, and slowly."""

import json
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.shards.packing import bytes_per_token
from llmtrain.data.tokenize.engines import load_exact


class ByteSizes:
    """Bytes of text behind each token, from the vocabulary, as `tokenizers` tells them by its offsets: a character of several
    tokens counts for the first of them. For byte-level tokenizers, which change nothing in a text."""

    def __init__(self, settings: str) -> None:
        content = json.loads(settings)
        tokenizer = Tokenizer.from_str(settings)
        self._lengths = np.zeros(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1, np.int64)
        self._trailing = self._lengths.copy()
        self._trims = '"trim_offsets": true' in json.dumps(content.get("post_processor"))
        for token, id in content["model"]["vocab"].items():
            self._lengths[id] = len(token)  # a character per byte
            spaces = len(token) - len(token.rstrip("Ġ"))
            self._trailing[id] = spaces if self._trims and spaces < len(token) else 0
        for token in content.get("added_tokens") or []:
            self._lengths[token["id"]] = 0 if token["special"] else len(token["content"].encode())

    def __call__(self, ids: NDArray, text: bytes) -> NDArray[np.int64] | None:
        """Bytes for each token, and behind them those without a token: [len(ids) + 1]; None where the vocabulary does not tell.

        That is for a text that its tokens do not spell, and where offsets are trimmed, for one that begins with a space, which
        may count as added.
        """
        lengths = self._lengths[ids]
        if len(text) != lengths.sum() or (self._trims and text.startswith(b" ")):
            return None
        plain = text.isascii()
        if plain and not self._trims:
            return np.append(lengths, 0)
        ends = np.cumsum(lengths)
        if not plain:
            data = np.append(np.frombuffer(text, np.uint8), np.uint8(0))
            for _ in range(3):  # to the end of the character that a token ends in
                ends += (data[ends] & 0xC0) == 0x80
        ends -= self._trailing[ids]
        return np.diff(np.maximum.accumulate(np.concatenate([[0], ends, [len(text)]])))


def sizes_agree(settings: str, texts: Sequence[str]) -> bool:
    """True if ByteSizes tells of each text what the offsets do, or nothing; False for a tokenizer that changes texts."""
    content = json.loads(settings)
    if content["model"].get("type") != "BPE" or content.get("normalizer"):
        return False
    tokenizer = load_exact(settings)
    sizes = ByteSizes(settings)
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        found = sizes(np.array(encoding.ids, np.int64), text.encode())
        if found is not None and not np.array_equal(found, bytes_per_token(text, encoding.offsets)):
            return False
    return True
