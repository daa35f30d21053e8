"""Records of a task with their locations, from local JSONL, a hub data set, MDS shards or a text file."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import zstandard

from llmtrain.config.report import nearest
from llmtrain.data.records import open_compressed
from llmtrain.data.source_files import PrepareError, list_files
from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.mds import read_mds
from llmtrain.eval.tasks.sections import Source


@dataclass(frozen=True)
class Record:
    """One record. where: `file:line`, `data set [split]:row` or `shard:row`, all but shard rows counted from 1."""

    where: str
    data: dict[str, Any]


def read_records(source: Source, base: Path, *, few_shot: bool = False) -> Iterator[Record]:
    """Records of a source, or of its few-shot examples.

    base: folder to which paths are relative. Raises EvalError with file and line for a malformed record.
    """
    other = source.few_shot if few_shot else None
    if source.path is not None:
        yield from _jsonl(_resolve(base, (other.path if other else None) or source.path))
    elif source.hub is not None:
        yield from _hub(source.hub, source.config, (other.split if other else None) or source.split or "")
    elif source.mds is not None:
        folder = _resolve(base, (other.mds if other else None) or source.mds)
        yield from (Record(f"{folder / shard}:{row}", data) for shard, row, data in read_mds(folder))
    else:
        assert source.text is not None
        yield _text(_resolve(base, source.text))


def _resolve(base: Path, path: str) -> Path:
    return base / Path(path).expanduser()


def _jsonl(file: Path) -> Iterator[Record]:
    if not file.exists():
        # An uncompressed and a compressed file stand for each other.
        others = [other for suffix in (".gz", ".zst") if (other := Path(f"{file}{suffix}")).exists()]
        if not others:
            raise EvalError(_missing(file))
        file = others[0]
    for number, line in enumerate(_lines(file), 1):
        if line.strip():
            yield Record(f"{file}:{number}", _object(line, f"{file}:{number}"))


def _missing(file: Path) -> str:
    if not file.parent.is_dir():
        return f"{file}: no such file, nor is there a folder {file.parent}"
    names = sorted(other.name for other in file.parent.iterdir() if ".jsonl" in other.name or other.suffix == ".txt")
    near = nearest(file.name, names)
    hint = f"did you mean {near[0]}?" if near else f"{file.parent} has {', '.join(names[:12]) or 'no JSONL files'}"
    return f"{file}: no such file; {hint}"


def _lines(file: Path) -> Iterator[bytes]:
    try:
        [found] = list_files([str(file)])
        with open_compressed(found) if found.compression else open(file, "rb") as stream:
            yield from stream
    except PrepareError as error:
        raise EvalError(str(error)) from None
    except (OSError, EOFError, zlib.error, zstandard.ZstdError) as error:
        raise EvalError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def _object(line: bytes, where: str) -> dict[str, Any]:
    try:
        record = json.loads(line.decode())
    except UnicodeDecodeError as error:
        raise EvalError(f"{where}: not UTF-8: {error.reason} at byte {error.start} of the line") from None
    except json.JSONDecodeError as error:
        raise EvalError(f"{where}: not JSON: {error.msg} at column {error.colno}") from None
    if not isinstance(record, dict):
        raise EvalError(f"{where}: expected an object, found {type(record).__name__}")
    if b"\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise EvalError(
                f"{where}: {half} is half of a character; write both halves, or the character itself"
            ) from None
    return record


def _text(file: Path) -> Record:
    try:
        return Record(str(file), {"text": file.read_bytes().decode()})
    except FileNotFoundError:
        raise EvalError(_missing(file)) from None
    except OSError as error:
        raise EvalError(f"{file}: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise EvalError(f"{file}: not UTF-8: {error.reason} at byte {error.start}") from None


def _hub(name: str, config: str | None, split: str) -> Iterator[Record]:
    where = f"{name}{f' ({config})' if config else ''} [{split}]"
    advice = "; without it, put a JSONL file into a folder and name that with --data-dir (the task's `local`)"
    import datasets

    try:
        rows = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # datasets raises whatever its many file systems and formats do
        first = (str(error) or type(error).__name__).splitlines()[0]
        raise EvalError(f"{where}: the Hugging Face hub did not give it: {first}{advice}") from None
    for number, row in enumerate(rows, 1):
        assert isinstance(row, dict)
        yield Record(f"{where}:{number}", row)
