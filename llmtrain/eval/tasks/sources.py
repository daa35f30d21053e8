"""Records of a task with their locations, from local JSONL, a hub data set, MDS shards or a text file."""

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from llmtrain.config.regular_file import open_regular, read_bytes
from llmtrain.config.report import nearest
from llmtrain.data.shards.index import ShardError
from llmtrain.data.shards.stored_stream import StoredStream, open_place
from llmtrain.data.sources.compression import DAMAGES, compression_of, decompress
from llmtrain.data.sources.record_text import line_fault
from llmtrain.errors import first_line
from llmtrain.eval.errors import EvalError
from llmtrain.eval.tasks.sections import Source

Row = tuple[str, int, dict[str, Any]]
"""(shard's file name, number of the row within it, its columns)."""


def open_mds(folder: Path) -> StoredStream:
    """A folder of shards. Raises EvalError where there is none."""
    try:
        found = open_place(str(folder))
    except ShardError as error:
        raise EvalError(str(error)) from None
    if found is None:
        splits = sorted(str(file.parent) for file in folder.glob("*/index.json"))
        hint = f"; did you mean {' or '.join(splits)}?" if splits else ""
        raise EvalError(f"{folder} holds no index.json of MDS shards{hint}")
    return found


def read_mds(folder: Path) -> Iterator[Row]:
    """All samples of a folder. Raises EvalError or ShardError for shards that are missing or damaged."""
    from streaming.base.format import reader_from_json  # imports torch

    stream = open_mds(folder)
    for number, info in enumerate(stream.index.shards):
        name = info["raw_data"]["basename"]
        try:
            reader: Any = reader_from_json(str(folder), None, dict(info))
            data, rows = stream.verified(number), info["samples"]
            # MDS: number of rows, then rows + 1 offsets, then their bytes.
            offsets = np.frombuffer(data, np.uint32, rows + 1, offset=4)
            for row in range(rows):
                yield name, row, reader.decode_sample(data[offsets[row] : offsets[row + 1]])
        except ShardError:
            raise
        except Exception as error:  # decoding raises what it likes
            raise EvalError(f"{folder / name} is a damaged shard: {error}") from None


@dataclass(frozen=True)
class Record:
    """One record. where: `file:line`, `data set [split]:row` or `shard:row`, all but shard rows counted from 1."""

    where: str
    data: dict[str, Any]


def read_records(
    source: Source, base: Path, *, few_shot: bool = False, bad: dict[str, str] | None = None
) -> Iterator[Record]:
    """Records of a source, or of its few-shot examples.

    base: folder to which paths are relative. bad: takes the reasons of malformed lines, by location. Raises EvalError with file
    and line for the first of them where there is no `bad`, and for a source that cannot be read at all.
    """
    other = source.few_shot if few_shot else None
    if source.path is not None:
        yield from _jsonl(_resolve(base, (other.path if other else None) or source.path), bad)
    elif source.hub is not None:
        split = (other.split if other else None) or source.split or ""
        configs = source.config or [None]
        for config in configs:
            for record in _hub(source.hub, config, split):
                yield Record(record.where, record.data | {"config": config}) if len(configs) > 1 else record
    elif source.mds is not None:
        folder = _resolve(base, (other.mds if other else None) or source.mds)
        yield from (Record(f"{folder / shard}:{row}", data) for shard, row, data in read_mds(folder))
    else:
        assert source.text is not None
        yield _text(_resolve(base, source.text))


def _resolve(base: Path, path: str) -> Path:
    return base / Path(path).expanduser()


def _jsonl(file: Path, bad: dict[str, str] | None) -> Iterator[Record]:
    if file.is_dir():
        raise EvalError(f"{file} is a folder; name a JSONL file in it (or, of MDS shards, `mds`)")
    if not file.exists():
        # An uncompressed and a compressed file stand for each other.
        others = [other for suffix in (".gz", ".zst") if (other := Path(f"{file}{suffix}")).exists()]
        if not others:
            raise EvalError(_missing(file))
        file = others[0]
    for number, line in enumerate(_lines(file), 1):
        line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        if not line.strip():
            continue
        try:
            record = Record(f"{file}:{number}", _object(line))
        except EvalError as error:
            if number == 1 and (line.strip() == b"{" or line.lstrip()[:1] == b"["):
                raise EvalError(f"{file}: JSON, but not JSONL; write one object a line") from None
            if bad is None:
                raise EvalError(f"{file}:{number}: {error}") from None
            bad[f"{file}:{number}"] = str(error)
        else:
            yield record


def _missing(file: Path) -> str:
    if not file.parent.is_dir():
        return f"{file}: no such file, nor is there a folder {file.parent}"
    names = sorted(other.name for other in file.parent.iterdir() if ".jsonl" in other.name or other.suffix == ".txt")
    near = nearest(file.name, names)
    hint = f"did you mean {near[0]}?" if near else f"{file.parent} has {', '.join(names[:12]) or 'no JSONL files'}"
    return f"{file}: no such file; {hint}"


def _lines(file: Path) -> Iterator[bytes]:
    try:
        with open_regular(file) as stored:
            compression = compression_of(stored.read(8))
            stored.seek(0)
            with decompress(stored, compression) as stream:
                yield from stream
    except DAMAGES as error:
        raise EvalError(f"{file}: {getattr(error, 'strerror', None) or error}") from None


def _object(line: bytes) -> dict[str, Any]:
    """Object of a line. Raises EvalError with the reason alone."""
    try:
        record = json.loads(line.rstrip().decode(), object_pairs_hook=_fields)
    except EvalError:
        raise
    except (ValueError, RecursionError) as error:
        raise EvalError(line_fault(error)) from None
    if not isinstance(record, dict):
        raise EvalError(f"expected an object, found {type(record).__name__}")
    if b"\\u" in line:
        try:
            json.dumps(record, ensure_ascii=False).encode()
        except UnicodeEncodeError as error:
            half = error.object[error.start].encode("unicode_escape").decode()
            raise EvalError(f"{half} is half of a character; write both halves, or the character itself") from None
    return record


def _fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    record = dict(pairs)
    if len(record) < len(pairs):
        names = [name for name, _ in pairs]
        raise EvalError(f"field `{next(name for name in names if names.count(name) > 1)}` is there twice; remove one")
    return record


def _text(file: Path) -> Record:
    try:
        return Record(str(file), {"text": read_bytes(file).decode()})
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
        raise EvalError(f"{where}: the Hugging Face hub did not give it: {first_line(error)}{advice}") from None
    for number, row in enumerate(rows, 1):
        assert isinstance(row, dict)
        yield Record(f"{where}:{number}", row)
