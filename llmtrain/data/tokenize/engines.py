"""Engines that tokenize: `tokenizers`, which every tokenizer is defined by, and faster ones that may stand in for it.

engine_choice.py proves that they do. No torch here.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.shards.packing import token_dtype
from llmtrain.distributed.processes import own_memory
from llmtrain.errors import UserError, first_line

BATCH_TEXT = 2 << 20
"""Characters that `tokenizers` encodes together; it needs some 40 bytes of memory for each."""
_CACHE_BYTES, _LOOKED_AT_EVERY = 256 << 20, 16 << 20
"""Memory by which the process may grow before gigatoken begins anew, and characters of text after which this is looked at: its
cache of words has no limit, and takes 90 MB for the words of 256 MB of source code. An empty one is a third slower for 200 MB."""
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of `ByteLevel` (Radford et al. 2019)."""


class Engine(Protocol):
    """A tokenizer as one library encodes with it. dtype: the smallest type that holds every id."""

    dtype: str

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray]:
        """Tokens of each text, of any type; what spells a special token is plain text."""
        ...


class EngineError(UserError):
    """An engine that cannot encode as a tokenizer does: why, as a sentence fragment."""


def load_exact(settings: str) -> Tokenizer:
    """The tokenizer of a tokenizer.json's content, set to read special tokens that are spelled out as plain text."""
    tokenizer = Tokenizer.from_str(settings)
    tokenizer.encode_special_tokens = True  # not stored in tokenizer.json; see make_tokenizer
    return tokenizer


class TokenizersEngine:
    """The Hugging Face library."""

    def __init__(self, settings: str) -> None:
        self._tokenizer = load_exact(settings)
        self.dtype = _dtype(self._tokenizer)

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray]:
        for group in _groups(texts):
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False):
                yield np.array(encoding.ids, self.dtype)


class GigatokenEngine:
    """gigatoken (Rød 2026): byte-level BPE with the patterns that it supports, and SentencePiece's BPE."""

    def __init__(self, settings: str) -> None:
        try:
            from gigatoken import Tokenizer as Gigatoken
        except ImportError:
            raise EngineError("gigatoken is not installed (`pip install 'llmtrain[fast]'`)") from None
        content = json.loads(settings)
        # Those that it has it also reads where they are spelled out in a text.
        content["added_tokens"] = [token for token in content.get("added_tokens") or [] if not token["special"]]
        self._load: Callable[[], Any] = lambda: Gigatoken.from_json(json.dumps(content)).backend
        try:
            self._tokenizer = self._load()
        except Exception as error:  # it raises RuntimeError and ValueError
            raise EngineError(f"gigatoken does not support this tokenizer: {first_line(error)}") from error
        self.dtype = _dtype(Tokenizer.from_str(settings))
        self._encoded, self._began_with = 0, own_memory()

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray]:
        self._encoded += sum(map(len, texts))
        if self._encoded > _LOOKED_AT_EVERY:
            self._encoded = 0
            if own_memory() - self._began_with > _CACHE_BYTES:
                self._tokenizer = self._load()
                self._began_with = own_memory()
        return map(self._tokenizer.encode, texts)  # one by one: a batch is an awkward array, which takes longer


class TiktokenEngine:
    """tiktoken (OpenAI): byte-level BPE of any pattern, without a normalizer or added tokens that are not special."""

    def __init__(self, settings: str) -> None:
        try:
            from tiktoken import Encoding
        except ImportError:
            raise EngineError("tiktoken is not installed (`pip install 'llmtrain[fast]'`)") from None
        content = json.loads(settings)
        ranks, self._ids = _ranks(content)
        self.dtype = self._ids.dtype.name
        try:
            self._encoding = Encoding("llmtrain", pat_str=_pattern(content), mergeable_ranks=ranks, special_tokens={})
        except ValueError as error:
            raise EngineError(f"tiktoken does not support this tokenizer: {first_line(error)}") from error

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray]:
        for text in texts:
            yield self._ids[self._encoding.encode_to_numpy(text, disallowed_special=())]


ENGINES: dict[str, Callable[[str], Engine]] = {
    "gigatoken": GigatokenEngine,
    "tiktoken": TiktokenEngine,
    "tokenizers": TokenizersEngine,
}
"""By name, the fastest first."""


def _pattern(content: dict[str, Any]) -> str:
    """The regular expression that cuts a text before its merges. Raises EngineError for what is not cut by one."""
    if content.get("normalizer") or any(not token["special"] for token in content.get("added_tokens") or []):
        raise EngineError("tiktoken has no normalizer, and no added tokens beside special ones")
    cutter = content.get("pre_tokenizer") or {}
    match cutter:
        case {"type": "ByteLevel", "use_regex": True, "add_prefix_space": False}:
            return _GPT2
        case {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "use_regex": False, "add_prefix_space": False},
            ],
        }:
            return pattern
    raise EngineError(f"tiktoken cuts texts by one regular expression, unlike the pre-tokenizer {cutter.get('type')}")


def _ranks(content: dict[str, Any]) -> tuple[dict[bytes, int], NDArray]:
    """Ranks of the tokens in tiktoken's sense, the order of their merges, and the id at each rank."""
    model = content["model"]
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise EngineError("tiktoken supports byte-level BPE alone")
    decoder, vocab = {character: byte for byte, character in _byte_characters().items()}, model["vocab"]
    characters = [character for character in decoder if character in vocab]
    if len(characters) < 256:
        raise EngineError("tiktoken needs a token for each byte")
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    tokens = characters + ["".join(pair) for pair in pairs]
    if len(set(tokens)) < len(tokens):
        raise EngineError("tiktoken cannot make one token by two merges")
    ranks = {bytes(decoder[character] for character in token): rank for rank, token in enumerate(tokens)}
    ids = np.array([vocab[token] for token in tokens])
    return ranks, ids.astype(token_dtype(int(ids.max()) + 1 if not content.get("added_tokens") else _size(content)))


def _size(content: dict[str, Any]) -> int:
    return max(*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])) + 1


def _byte_characters() -> dict[int, str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + number) for number, byte in enumerate(others)}


def _dtype(tokenizer: Tokenizer) -> str:
    return token_dtype(max(tokenizer.get_vocab(with_added_tokens=True).values()) + 1)


def _groups(texts: Sequence[str]) -> Iterator[list[str]]:
    group: list[str] = []
    size = 0
    for text in texts:
        group.append(text)
        size += len(text)
        if size >= BATCH_TEXT:
            yield group
            group, size = [], 0
    if group:
        yield group
