"""Loading and training tokenizers. Needs only `tokenizers`; transformers is a fallback for old, slow formats."""

import itertools
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from llmtrain.config.addresses import may_be_hub_name
from llmtrain.config.regular_file import parse_json, read_bytes, read_text
from llmtrain.errors import UserError
from llmtrain.models.hf.foreign_files import reason

EOD = "<|endoftext|>"
"""End-of-document token of the tokenizers trained here."""

CONFIG_FILES = ("tokenizer_config.json", "special_tokens_map.json")
CHAT_TEMPLATE = "chat_template.jinja"
FURTHER_TEMPLATES = "additional_chat_templates"
"""Folder of the chat templates that a model has besides, NAME.jinja."""
GENERATION_CONFIG = "generation_config.json"
COMPANIONS = (CHAT_TEMPLATE, f"{FURTHER_TEMPLATES}/*.jinja", GENERATION_CONFIG)
"""Patterns of a published model's files that are kept with its tokenizer."""


_LONGEST_WORD = 4096
_LONG_RUN = re.compile(
    "|".join(rf"(?<!{one}){one}{{{_LONGEST_WORD},}}" for one in (r"[^\W\d_]", r"\d", r"\s", r"(?:[^\w\s]|_)"))
)
"""Letters, digits, spaces or others, of which each is a word to the pre-tokenizer."""


class TokenizerError(UserError):
    """A tokenizer that cannot be found or loaded, or that lacks a token."""


@dataclass(frozen=True)
class TextTokenizer:
    """A tokenizer and its end-of-document token.

    `backend` is the `tokenizers.Tokenizer`; text that spells a special token is encoded as plain text.
    """

    backend: Tokenizer
    eod_token: str
    eod_id: int
    config: dict[str, Any]
    """Content of tokenizer_config.json."""
    chat_template: str | None = None
    """Content of chat_template.jinja."""
    folder: Path | None = None
    """The folder that it was read from."""
    further_templates: dict[str, str] = field(default_factory=dict)
    """Content of the files in additional_chat_templates/, by their names."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """Content of generation_config.json: a published model's tokens that end an answer, and how it is to be sampled."""
    begins: tuple[int, ...] | None = None
    """Tokens with which texts began in training; None: those that the post-processor of tokenizer.json puts before a text."""

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.backend.encode_special_tokens = True  # which is not among what is pickled of it

    @property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return max(self.backend.get_vocab(with_added_tokens=True).values()) + 1

    @property
    def rows_needed(self) -> int:
        """One more than the largest token id that a text can become: a published tokenizer may have special tokens beyond the
        rows of its model's embedding (Gemma 3's for images), which text never becomes.
        """
        special = {id_ for id_, token in self.backend.get_added_tokens_decoder().items() if token.special}
        ids = self.backend.get_vocab(with_added_tokens=True).values()
        return max(self.eod_id, *self._beginning, *(id_ for id_ in ids if id_ not in special)) + 1

    @property
    def bos_id(self) -> int:
        """Id of the token that begins a document. Raises TokenizerError for a tokenizer without one."""
        found = self.role_id("bos")
        if found is None:
            raise TokenizerError(
                f"add_bos_token: the tokenizer has no bos_token (tokenizer_config.json says {self.role_text('bos')!r}); leave it "
                "out, or name one of its tokens there"
            )
        return found

    def role_text(self, role: str) -> str | None:
        """Text of the token that the config names ROLE_token: bos, eos, pad, unk, sep, cls, mask; None where it names none."""
        return token_text(self.config.get(f"{role}_token"))

    def role_id(self, role: str) -> int | None:
        """Id of that token; None where there is none in the vocabulary."""
        text = self.role_text(role)
        return self.backend.token_to_id(text) if text else None

    @property
    def end_ids(self) -> list[int]:
        """Ids of the tokens that end an answer: the end-of-document token, and those of the generation config."""
        return list(dict.fromkeys([self.eod_id, *end_ids(self.generation_config)]))

    @cached_property
    def byte_ids(self) -> frozenset[int]:
        """Ids of the tokens <0x00> to <0xFF> where the decoder falls back to bytes: a run of them becomes text as one, where all of
        it is UTF-8."""
        found = [self.backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        letter = found[ord("A")]
        falls_back = letter is not None and "AA" in self.decode([letter, letter])
        return frozenset(one for one in found if one is not None) if falls_back else frozenset()

    @property
    def _beginning(self) -> tuple[int, ...]:
        """Ids with which a text begins."""
        if self.begins is not None:
            return self.begins
        found = self.backend.encode("a")
        count = next((at for at, special in enumerate(found.special_tokens_mask) if not special), 0)
        return tuple(found.ids[:count])

    def prompt_ids(self, text: str) -> list[int]:
        """Ids of a text to be continued, begun as in training; the end-of-document token for an empty one without such a token."""
        return [*self._beginning, *self.encode(text)] or [self.eod_id]

    def encode(self, text: str) -> list[int]:
        """Ids of a text alone. Raises TokenizerError for one with half of a UTF-16 pair, which JSON's \\ud800 gives."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise TokenizerError(
                f"{text[error.start]!a}, character {error.start + 1} of {text[:40]!a}, is half of a UTF-16 pair, no text"
            ) from None
        return self.backend.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        return self.backend.decode(list(ids), skip_special_tokens=False)

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json, tokenizer_config.json, chat templates and generation_config.json, those that there are, as
        `transformers` and `tokenizers` read them.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        (path / "tokenizer.json").write_text(self.backend.to_str(), encoding="utf-8")
        (path / "tokenizer_config.json").write_text(json.dumps(self.config, indent=2) + "\n", encoding="utf-8")
        if self.chat_template is not None:
            (path / CHAT_TEMPLATE).write_text(self.chat_template, encoding="utf-8")
        for name, text in self.further_templates.items():
            (path / FURTHER_TEMPLATES).mkdir(exist_ok=True)
            (path / FURTHER_TEMPLATES / name).write_text(text, encoding="utf-8")
        if self.generation_config:
            text = json.dumps(self.generation_config, indent=2) + "\n"
            (path / GENERATION_CONFIG).write_text(text, encoding="utf-8")


def token_text(token: object) -> str | None:
    """Text of a token in a tokenizer's config: itself, or the `content` of a description. Raises TokenizerError for no token."""
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str | None):
        raise TokenizerError(
            f"tokenizer_config.json: {token!r} is no token; a token is a text, or an object with `content`"
        )
    return text or None


def end_ids(config: dict[str, Any]) -> list[int]:
    """The eos_token_id of a generation config: one, several or none."""
    named = config.get("eos_token_id")
    return [one for one in (named if isinstance(named, list) else [named]) if type(one) is int]


def read_generation_config(folder: Path) -> dict[str, Any]:
    """Content of a folder's generation_config.json; without one, the ends that config.json names, as in transformers."""
    if (folder / GENERATION_CONFIG).is_file():
        return _read_json(folder / GENERATION_CONFIG)
    ends = end_ids(_read_json(folder / "config.json"))
    return {"eos_token_id": ends} if len(ends) > 1 else {"eos_token_id": ends[0]} if ends else {}


def make_tokenizer(backend: Tokenizer, eod_token: str, config: dict[str, Any]) -> TextTokenizer:
    """Configure `backend` for documents. Raises TokenizerError when `eod_token` is not in its vocabulary."""
    eod_id = backend.token_to_id(eod_token)
    if eod_id is None:
        raise TokenizerError(f"the end-of-document token {eod_token!r} is not in the tokenizer's vocabulary")
    backend.no_padding()
    backend.no_truncation()
    # A document that happens to contain "<|endoftext|>" must not end there.
    backend.encode_special_tokens = True
    return TextTokenizer(backend, eod_token, eod_id, config)


def train_bpe(
    texts: Iterable[str], vocab_size: int, *, or_fewer: bool = False, further: Sequence[str] = ()
) -> TextTokenizer:
    """Train a byte-level BPE (Radford et al. 2019) of exactly `vocab_size` entries, the first of which is EOD.

    Lossless: no normalisation, every byte has a token. Raises TokenizerError if the text yields fewer entries, unless
    or_fewer. further: special tokens beside EOD, the last of which ends answers.
    """
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOD, *further],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(itertools.chain.from_iterable(map(_in_short_words, texts)), trainer)
    size = backend.get_vocab_size()
    if size < vocab_size and not or_fewer:
        raise TokenizerError(
            f"the training text yields only {size} of the {vocab_size} tokens asked for; lower vocab_size or add text"
        )
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": EOD,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 10**30,
    }
    made = make_tokenizer(backend, EOD, config)
    ends = [made.eod_id, backend.token_to_id(further[-1])] if further else None
    return replace(made, generation_config={"eos_token_id": ends}) if ends else made


def _in_short_words(text: str) -> Iterator[str]:
    """The text, cut within words longer than _LONGEST_WORD: the trainer's time grows with their square."""
    at = 0
    for run in _LONG_RUN.finditer(text) if len(text) > _LONGEST_WORD else ():
        for cut in range(run.start() + _LONGEST_WORD, run.end(), _LONGEST_WORD):
            yield text[at:cut]
            at = cut
    yield text[at:]


def load_tokenizer(name: str | os.PathLike[str]) -> TextTokenizer:
    """Load a tokenizer from a folder, a tokenizer.json, or the Hugging Face hub.

    Raises TokenizerError with what is missing, and for the hub what to do without it.
    """
    text = os.fspath(name)
    path = Path(text).expanduser()
    if path.is_file():
        return _load_file(path)
    if path.is_dir():
        return _load_folder(path)
    if not may_be_hub_name(text):
        raise TokenizerError(f"there is no tokenizer at {text}: no such file or folder")
    return _load_hub(text)


def _load_folder(folder: Path) -> TextTokenizer:
    if os.path.lexists(folder / "tokenizer.json"):
        return _load_file(folder / "tokenizer.json")
    if not any(folder.glob("*token*")) and not any(folder.glob("*.model")):
        raise TokenizerError(f"{folder} holds no tokenizer (no tokenizer.json)")
    return _load_slow(str(folder))


def _load_file(file: Path) -> TextTokenizer:
    try:
        backend = Tokenizer.from_buffer(read_bytes(file))
    except Exception as error:  # tokenizers raises plain Exception
        raise TokenizerError(f"{file} is not a tokenizer of the `tokenizers` library: {error}") from error
    config = _read_config(file.parent)
    made = make_tokenizer(backend, _eod_token(backend, config, str(file)), config)
    return replace(made, folder=file.parent, **_read_companions(file.parent))


def _read_companions(folder: Path) -> dict[str, Any]:
    """Chat templates and the generation config, as fields of a tokenizer."""
    template = folder / CHAT_TEMPLATE
    return {
        "chat_template": _read_text(template) if template.is_file() else None,
        "further_templates": {
            file.name: _read_text(file) for file in sorted((folder / FURTHER_TEMPLATES).glob("*.jinja"))
        },
        "generation_config": read_generation_config(folder),
    }


def _read_text(file: Path) -> str:
    try:
        return read_text(file)
    except UnicodeDecodeError as error:
        raise TokenizerError(f"{file} is not UTF-8 text: {error}") from error


def _read_json(file: Path) -> dict[str, Any]:
    """Content of a file; nothing of one that is not there."""
    if not file.is_file():
        return {}
    try:
        content = parse_json(_read_text(file))
    except json.JSONDecodeError as error:
        raise TokenizerError(f"{file} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise TokenizerError(f"{file} is not a JSON object")
    return content


def _read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = {}
    for name in reversed(CONFIG_FILES):
        config |= _read_json(folder / name)
    return config


def _eod_token(backend: Tokenizer, config: dict[str, Any], where: str) -> str:
    if token := token_text(config.get("eos_token")):
        return token
    if backend.token_to_id(EOD) is not None:
        return EOD
    raise TokenizerError(f"{where}: no end-of-document token; set eos_token in the tokenizer_config.json beside it")


def _load_hub(name: str) -> TextTokenizer:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        folder = snapshot_download(
            name, allow_patterns=["tokenizer*", "special_tokens_map.json", "*.model", "vocab*", "merges*", *COMPANIONS]
        )
    except HFValidationError as error:
        raise TokenizerError(f"'{name}' is neither a folder, nor a file, nor a name on the Hugging Face hub") from error
    except Exception as error:  # of the hub's client, and of the HTTP library that it uses
        raise TokenizerError(
            f"tokenizer '{name}' is not a local path, and the Hugging Face hub did not give it "
            f"({type(error).__name__}). Check the name; for a gated model run `hf auth login`; without internet, run "
            f"`hf download {name} --include 'tokenizer*' --local-dir DIR` elsewhere and name a copy of DIR."
        ) from error
    return _load_folder(Path(folder))


def _load_slow(folder: str) -> TextTokenizer:
    """Load a format older than tokenizer.json, which transformers converts."""
    from transformers import AutoTokenizer

    try:
        slow = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers raises whatever its many formats do
        raise TokenizerError(f"{folder}: transformers cannot load a tokenizer from it: {reason(error)}") from error
    backend = getattr(slow, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerError(f"{folder}: this tokenizer has no fast version, which prepare needs")
    if not slow.eos_token:
        raise TokenizerError(f"{folder}: the tokenizer has no eos_token to end documents with")
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": str(slow.eos_token)}
    if slow.bos_token:
        config["bos_token"] = str(slow.bos_token)
    made = make_tokenizer(Tokenizer.from_str(backend.to_str()), str(slow.eos_token), config)
    template = slow.chat_template
    found = _read_companions(Path(folder))
    found["chat_template"] = template.get("default") if isinstance(template, dict) else template
    return replace(made, folder=Path(folder), **found)
