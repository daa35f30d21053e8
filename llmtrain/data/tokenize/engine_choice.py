"""The choice of an engine that tokenizes: one faster than `tokenizers` is used once it was proved equal on a sample of the run's
own text, with special tokens spelled out in it."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from llmtrain.data.shards.packing import bytes_per_token
from llmtrain.data.tokenize.engines import ENGINES, Engine, EngineError, TokenizersEngine, load_exact
from llmtrain.errors import RunError, first_line


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


_PROVED_EVERY, _PROVED_CHARACTERS = 32 << 20, 1 << 12
"""Characters of text after which so many of them are compared again: 0.01 %."""


@dataclass(frozen=True)
class EngineChoice:
    """The engine of a run. note: what was found, for the log. sizes: True where ByteSizes was proved equal as well."""

    name: str = "tokenizers"
    note: str = "tokenizers"
    sizes: bool = False


def choose_engine(wanted: str, settings: str, sample: Sequence[str]) -> EngineChoice:
    """The engine `wanted`, or with `auto` the fastest that is proved equal on the sample.

    settings: the content of a tokenizer.json. Raises EngineError if `wanted` is no such engine.
    """
    if wanted == "tokenizers":
        return EngineChoice(wanted, "tokenizers, as asked for")
    texts = [*sample, *adversarial_texts(settings, sample)]
    expected = list(TokenizersEngine(settings).encode(texts))
    refusals = []
    for name in ENGINES if wanted == "auto" else (wanted,):
        if name == "tokenizers":
            break
        try:
            _prove(name, ENGINES[name](settings), texts, expected)
        except EngineError as error:
            refusals.append(str(error))
            continue
        nbytes = sum(len(text.encode()) for text in texts)
        note = f"{name} {version(name)}, equal to tokenizers on {len(texts):,} texts of {nbytes:,} bytes of this input"
        return EngineChoice(name, note, sizes_agree(settings, texts[::-1][:: len(texts) // 64 + 1]))
    if wanted != "auto":
        raise EngineError(refusals[0])
    return EngineChoice("tokenizers", "; ".join(["tokenizers", *refusals]))


def _prove(name: str, engine: Engine, texts: Sequence[str], expected: Sequence[NDArray]) -> None:
    try:
        for text, ids, wanted in zip(texts, engine.encode(texts), expected, strict=True):
            if not np.array_equal(ids, wanted):
                raise EngineError(f"{name} gives other tokens than tokenizers for the text {_shown(text, ids, wanted)}")
    except EngineError:
        raise
    except BaseException as error:  # a panic of Rust is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        raise EngineError(f"{name} failed on this input: {first_line(error)}") from error


def _shown(text: str, ids: NDArray, wanted: NDArray) -> str:
    shorter = min(len(ids), len(wanted))
    differing = np.flatnonzero(ids[:shorter] != wanted[:shorter])
    at = int(differing[0]) if len(differing) else shorter
    begin = max(len(text) * at // max(len(wanted), 1) - 20, 0) if len(text) > 80 else 0
    return f"{text[begin : begin + 80]!r} (token {at})"


def adversarial_texts(settings: str, sample: Sequence[str]) -> list[str]:
    """Texts in which tokenizers differ: each added token spelled out, alone and within text of the sample, and what is rare."""
    added = [token["content"] for token in json.loads(settings).get("added_tokens") or []]
    host = next((text[:200] for text in sample if text), "some text")
    half = len(host) // 2
    spelled = [
        part
        for token in added[:64]
        for part in (token, f" {token} ", f"{token}{token}\n", f"{host[:half]}{token}{host[half:]}", token[:-1])
    ]
    return [*spelled, "".join(added[:64]), *_RARE]


_RARE = [
    "",
    " ",
    "   \t\n\r\n \u00a0\u2003 x  ",
    "a\r\nb\rc\n\n\n  d",
    "nul \0 and \x7f\x1b control",
    "\ufeffmark, \u200d\u200b joiners, \u2028\u2029\x85 line ends",
    "I'LL we'Re don't DON'T ’s 'S ſ's",
    "1234567890123 ١٢٣٤ ४५६ Ⅷ ½ ² 3,141.59 0x1F",
    "naïve é e\u0301 \u0301 Å Å ﬁ İi ß ẞ Σς",
    "走る 中文，标点。한국어 ไทยภาษา עִבְרִית عَرَبِيّ हिन्दी",
    "👩‍👩‍👧‍👦 🏳️‍🌈 𝔘𝔫𝔦 𐍈 \U0010ffff \ue000",
    "_snake_case camelCase HTTPServer2 #!/bin/sh --x=y {[(<>)]}; ...!!!???",
    "x" * 3000 + " " * 500 + "=" * 500 + "\n" * 50 + "走" * 500,
]


class VerifiedTokenizer:
    """The engine of a choice, with the bytes behind its tokens. Now and then it is compared with `tokenizers` again."""

    def __init__(self, settings: str, choice: EngineChoice) -> None:
        self._settings, self.name = settings, choice.name
        self._engine = ENGINES[choice.name](settings)
        self._sizes = ByteSizes(settings) if choice.sizes else None
        self._unproved = 0

    @cached_property
    def _exact(self) -> Tokenizer:
        return load_exact(self._settings)

    @property
    def dtype(self) -> str:
        """The smallest type that holds every id."""
        return self._engine.dtype

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray]:
        """Tokens of each text, of any type. Raises RunError where the engine is not equal to `tokenizers`."""
        if self.name != "tokenizers":
            self._unproved += sum(map(len, texts))
            if self._unproved >= _PROVED_EVERY:
                self._unproved = 0
                self._prove(max(texts, key=len)[:_PROVED_CHARACTERS])
        return self._engine.encode(texts)

    def _prove(self, text: str) -> None:
        expected = self._exact.encode(text, add_special_tokens=False).ids
        if next(iter(self._engine.encode([text]))).tolist() != expected:
            raise self._unequal(text)

    def sizes(self, ids: NDArray, text: str) -> NDArray[np.int64]:
        """Bytes of a text behind each of its tokens, and those of none: [len(ids) + 1]."""
        found = self._sizes(ids, text.encode()) if self._sizes else None
        if found is None:
            encoding = self._exact.encode(text, add_special_tokens=False)  # encode_batch_fast() returns no offsets
            if encoding.ids != ids.tolist():
                raise self._unequal(text)
            found = bytes_per_token(text, encoding.offsets)
        return found

    def _unequal(self, text: str) -> RunError:
        return RunError(
            f"{self.name} gives other tokens than tokenizers for a text of this input, unlike on its sample: {text[:80]!r}…; "
            "prepare with tokenizer_engine: tokenizers (--tokenizer-engine tokenizers), and --overwrite"
        )
