"""Faults of `data.prepare` that show without reading a text: its sources, its tokenizer and the folder it writes. No torch here."""

import json
import math
import os
import re
from collections.abc import Iterator
from pathlib import Path

from llmtrain.config.addresses import may_be_hub_name
from llmtrain.config.base import Problem
from llmtrain.config.output_folder import unwritable_reason, working_folder
from llmtrain.config.regular_file import read_json
from llmtrain.data.chat.recognise import recognised
from llmtrain.data.partitions.prepared_folder import LATER_SETTINGS, MANIFEST, SETTINGS, read_manifest, setting
from llmtrain.data.shards.index import NOT_MARKED
from llmtrain.data.sources.files import PrepareError, SourceFile, stored_bytes
from llmtrain.data.sources.token_kinds import token_kind
from llmtrain.schema.config import Config
from llmtrain.schema.data import PrepareConfig

_BYTE_LEVEL = 257
"""Entries of a byte-level BPE before its first merge: the bytes and end of document."""


def prepare_problems(config: Config) -> Iterator[Problem]:
    """Problems of data.prepare, with paths from the top; none without it."""
    prepare = config.data.prepare
    if prepare is None:
        return
    found = [*_source_problems(config, prepare), *_tokenizer_problems(config, prepare)]
    made, wrong = ([], []) if found else _recognised(prepare)
    for problem in [*found, *wrong, *_folder_problems(prepare, made)]:
        yield Problem(f"data.prepare.{problem.path}", problem.found, problem.message)
    if config.objective.trained_only and any(one.chat is None for one in made):
        sources = ", ".join(source for one in made if one.chat is None for source in one.sources)
        yield Problem("data.prepare", sources, NOT_MARKED)
    if any(one.chat is not None for one in made) and not config.data.mask_documents:
        message = "conversations are packed with masks between them; set this to true"
        yield Problem("data.mask_documents", False, message)


def _recognised(prepare: PrepareConfig) -> tuple[list[PrepareConfig], list[Problem]]:
    """The configs of each folder as they are made, and problems of their records' format."""
    made = []
    for one in prepare.each().values() or [prepare]:
        try:
            made.append(recognised(one))
        except PrepareError as error:
            return [], [Problem("chat", None, str(error))]
    return made, []


def _source_problems(config: Config, prepare: PrepareConfig) -> Iterator[Problem]:
    samples = math.lcm(config.samples_per_step, config.data.num_canonical_nodes)
    tokens = samples * prepare.seq_len
    enough, found, broken = max(tokens, prepare.vocab_size or 0), 0.0, False
    for path, source in prepare.sources_by_path().items():
        try:
            size = stored_bytes(source, enough)
        except OSError as error:
            size, broken = 1, True
            yield Problem(path, source, f"cannot be read: {error.strerror or error}")
        if not size:
            yield Problem(path, source, "holds no text (known extensions: .txt, .md, .py, .jsonl, ...)")
        found += size
    if broken or not found:
        return
    most = min(found, len(prepare.each() or [1]) * (prepare.max_bytes or math.inf))
    limit = "max_bytes" if most < found else "streams" if prepare.streams else "sources"
    if 2 * most < tokens:  # a token is a byte or more, or the end of a document of one byte or more
        yield Problem(
            limit,
            None,
            f"{most} bytes of text are too few for {samples} samples of {prepare.seq_len} tokens, which one epoch needs "
            "(train.global_batch_size, data.num_canonical_nodes)",
        )
    if prepare.vocab_size and prepare.vocab_size - _BYTE_LEVEL > most:
        yield prepare.problem_at("vocab_size", f"{most} bytes of text cannot fill so many entries")


def _tokenizer_problems(config: Config, prepare: PrepareConfig) -> Iterator[Problem]:
    if prepare.tokenizer is None:
        return
    path = Path(prepare.tokenizer).expanduser()
    file = path / "tokenizer.json" if path.is_dir() else path
    if file.is_file():
        try:
            size = _vocabulary(file)
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            yield prepare.problem_at("tokenizer", f"{file} is not a tokenizer of the `tokenizers` library")
            return
        if size > config.model.vocab_size:
            text = f"has {size} tokens, more than model.vocab_size ({config.model.vocab_size})"
            yield prepare.problem_at("tokenizer", text)
    elif path.is_dir():
        if not any(path.glob("*token*")) and not any(path.glob("*.model")):
            yield prepare.problem_at("tokenizer", "is a folder without a tokenizer.json")
    elif not may_be_hub_name(prepare.tokenizer):
        yield prepare.problem_at("tokenizer", "there is no such file or folder")
    elif not re.fullmatch(
        r"(?!.*(--|\.\.))([A-Za-z0-9_][\w.-]*/)?[A-Za-z0-9_][\w.-]{0,95}(?<![.-])", prepare.tokenizer, re.ASCII
    ):
        yield prepare.problem_at("tokenizer", "is no file, no folder, and no name on the Hugging Face hub")


def _vocabulary(file: Path) -> int:
    """One more than the largest token id."""
    content = read_json(file)
    entries = content["model"]["vocab"]
    ids = [len(entries) - 1] if isinstance(entries, list) else list(entries.values())
    return max([*ids, *(token["id"] for token in content.get("added_tokens", []))]) + 1


def _folder_problems(prepare: PrepareConfig, made: list[PrepareConfig]) -> Iterator[Problem]:
    """made: the configs of each folder, where their records' format is known."""
    if prepare.streams is None:
        yield from _out_problems(*(made or [prepare]))
        return
    for one in made or prepare.each().values():
        if one.vocab_size is not None:  # trained once, for all
            tokenizer = str(Path(prepare.out).expanduser().absolute() / "tokenizer")
            one = one.model_copy(update={"tokenizer": tokenizer, "vocab_size": None})
        if problems := list(_out_problems(one)):
            yield from problems
            return


def _out_problems(prepare: PrepareConfig) -> Iterator[Problem]:
    out = Path(prepare.out).expanduser().absolute()
    if reason := unwritable_reason(out):
        yield prepare.problem_at("out", reason)
        return
    for source in prepare.sources:
        folder = Path(source).expanduser().absolute()
        if source != "stdlib" and folder.is_dir() and out.is_relative_to(folder):
            yield prepare.problem_at("out", f"lies inside the source {source}, of which it would become a part")
    if not out.exists() or not any(out.iterdir()):
        return
    try:
        manifest = read_manifest(out)
        if manifest is None:
            text = f"exists and was not made by `llmtrain prepare` (no {MANIFEST}); choose another folder"
            yield prepare.problem_at("out", text)
            return
        made = LATER_SETTINGS | dict(manifest["inputs"])
    except (PrepareError, KeyError, TypeError, ValueError) as error:
        reason = str(error) if isinstance(error, PrepareError) else f"{out / MANIFEST} is damaged"
        yield prepare.problem_at("out", reason)
        return
    for name in SETTINGS:
        if name == "validation_fraction" and prepare.validation_tokens is not None:
            continue  # estimated
        if name in made and made[name] != (value := setting(prepare, name)):
            text = f"{prepare.out} was made with {json.dumps(made[name])}; name another `out`, or remove that folder"
            yield Problem(name, value, text)


def refuse_own_folder(out: Path, files: list[SourceFile]) -> None:
    """Raise PrepareError for a folder to be made that lies inside a source."""
    mine = tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in (out, working_folder(out)))
    for file in files:
        if file.path.startswith("/") and os.path.realpath(file.path).startswith(mine):
            raise PrepareError(
                f"{out} lies inside a source ({file.path}), of which it would become a part; name another --out"
            )


def refuse_token_files(files: list[SourceFile]) -> None:
    """Raise PrepareError for token files, where the tokenizer is to be trained."""
    for file in files:
        if token_kind(file.path, file.from_folder):
            raise PrepareError(f"{file.path} holds tokens: name the tokenizer that they were made with (--tokenizer)")
