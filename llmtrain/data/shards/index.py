"""The index.json of MDS shards, and a shard's file beside what the index says of it. No torch here.

Shards may come from anywhere: nothing in an index may reach outside of its folder, or name a column that is read by running
what it holds.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, BinaryIO, Literal

import xxhash
from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    NonNegativeInt,
    TypeAdapter,
    ValidationError,
    model_validator,
)

from llmtrain.config.base import setting_error
from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.data.shards.table import ShardTable, shared_table
from llmtrain.errors import UserError

TOKEN_COLUMNS = ("tokens", "input_ids")
"""Columns that may hold token ids; llmtrain and LLM Foundry write the first."""
FLAG_COLUMN = "token_flags"
"""Column of the flags of tokens (packing.py): uint8 [seq_len]. Only shards of conversations have it."""
NOT_MARKED = (
    "is text, of which no token is marked as trained; make the shards from conversations (`llmtrain prepare`, docs/data.md), or "
    "leave `objective` at next_token"
)

NUMBERS = {f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)} - {"float8"}
_ENCODINGS = (
    {"bytes", "str", "int", "ndarray", "str_int", "str_float", "str_decimal", "json"}
    | {"pil", "jpeg", "jpeg_array", "jpegarray", "png", "list[pil]", "list[jpeg]", "list[png]"}
    | NUMBERS
)
"""Encodings of columns, before the colon, that are plain data. MDS has one more, pkl."""
_TOKEN_ENCODING = re.compile(r"bytes|ndarray(:u?int(8|16|32|64)(:\d+)?)?")
"""Encodings of tokens: LLM Foundry's older shards have bytes, of int64."""
_COLUMNS = ("column_names", "column_encodings", "column_sizes")
_OF_ANY_LENGTH = {"shake_128", "shake_256"}


class ShardError(UserError):
    """Shards that are missing, damaged, or do not fit the config."""


@dataclass(frozen=True)
class Index:
    """One stream's index.json. folder: where it lies; also an address."""

    folder: Path | str
    shards: ShardTable

    @functools.cached_property
    def samples(self) -> int:
        return sum(self.shards.samples)

    @property
    def hash_algorithm(self) -> str | None:
        """The fastest hash algorithm that all shards have in common, or None."""
        common = set.intersection(*(set(kind["hashes"]) for kind in self.shards.kinds)) if self.shards else set()
        known = common & (xxhash.algorithms_available | hashlib.algorithms_guaranteed) - _OF_ANY_LENGTH
        return min(known, key=lambda name: (name not in xxhash.algorithms_available, name), default=None)

    def seq_lens(self) -> set[int | None]:
        """Tokens per sample by the columns' encodings; None for columns with a length per sample."""
        return {_seq_len(kind) for kind in self.shards.kinds}

    def has_tokens(self) -> bool:
        return all(any(name in kind["column_names"] for name in TOKEN_COLUMNS) for kind in self.shards.kinds)

    def token_fault(self) -> str | None:
        """Reason why a column of tokens cannot hold them by its encoding; None if all can."""
        return next((fault for kind in self.shards.kinds if (fault := _token_fault(kind))), None)


def _token_fault(kind: dict[str, Any]) -> str | None:
    encodings = dict(zip(kind["column_names"], kind["column_encodings"], strict=True))
    name = next((name for name in TOKEN_COLUMNS if name in encodings), None)
    if name is None or _TOKEN_ENCODING.fullmatch(encodings[name]):
        return None
    return (
        f"column_encodings of the column '{name}' is {encodings[name]!r}; tokens are one row of integers (ndarray:uint16:LENGTH, "
        "ndarray:int32, bytes of int64)"
    )


def _encoded_size(encoding: str) -> int | None:
    """Bytes of a column's value; None where the encoding leaves them to each sample."""
    kind, *rest = encoding.split(":")
    if kind == "ndarray" and rest and rest[0] not in NUMBERS:
        raise _Invalid(rest[0])
    if kind == "ndarray" and len(rest) == 2:
        return _number_size(rest[0]) * math.prod(map(int, rest[1].split(",")))
    return 8 if kind == "int" else _number_size(kind) if kind in NUMBERS else None


def _number_size(kind: str) -> int:
    """Bytes of one of NUMBERS."""
    return int(kind.lstrip("uintfloa")) // 8


def _seq_len(kind: dict[str, Any]) -> int | None:
    encodings = dict(zip(kind["column_names"], kind["column_encodings"], strict=True))
    encoding = next((encodings[name] for name in TOKEN_COLUMNS if name in encodings), "")
    parts = encoding.split(":")
    return int(parts[2]) if parts[0] == "ndarray" and len(parts) == 3 and parts[2].isdigit() else None


def read_index(folder: Path) -> Index | None:
    """Read a folder's index.json; None if there is none. Raises ShardError for one that is not an index."""
    file = folder / "index.json"
    try:
        with open_regular(file) as opened:
            about = os.fstat(opened.fileno())
            found = (str(file), about.st_dev, about.st_ino, about.st_mtime_ns, about.st_size)
            if found not in _READ:
                if len(_READ) >= _MOST_READ:
                    _READ.clear()
                _READ[found] = parse_index(opened.read(), folder)
            return _READ[found]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ShardError(f"{file} cannot be read: {error.strerror or error}") from error


_READ: dict[tuple[str, int, int, int, int], Index] = {}
"""Indexes that this process has read, by the file and its times: a start asks for each several times."""
_MOST_READ = 64


def parse_index(text: bytes, folder: Path | str) -> Index:
    """Decode the index.json of a folder or address. Raises ShardError if it is not an index."""
    file = f"{folder}/index.json"
    try:
        return Index(folder, shared_table(text, _valid_entries))
    except _Twice as error:
        raise ShardError(f"{file} {error}") from None
    except (_Invalid, NoSuchList, RecursionError, ValueError) as error:  # ValueError: also of json and of UTF-8
        raise ShardError(f"{file} is not the index of MDS shards: {error}") from None


class _Invalid(Exception):
    """A fault of an index."""


class _Twice(Exception):
    """A shard that an index names twice."""


def _valid_entries(text: bytes) -> Iterator[dict[str, Any]]:
    """The entries of an index.json, validated some at a time: all of them as objects would take a gigabyte per 300,000."""
    names: Counter[str] = Counter()
    begin = 0
    for entries in list_in_chunks(text.decode(), "shards"):
        _validate(entries, begin)
        begin += len(entries)
        names.update(entry["raw_data"]["basename"] for entry in entries)
        yield from entries
    if len(names) < begin:
        name, count = names.most_common(1)[0]
        raise _Twice(f"names the shard {name} {count} times; its samples would count as often")


def _validate(shards: list[Any], begin: int) -> None:
    try:
        _SHARDS.validate_python(shards)
    except ValidationError as error:
        first = error.errors()[0]
        number, *rest = first["loc"]
        where = ".".join(map(str, ("shards", int(number) + begin, *rest)))
        raise _Invalid(f"{where}: {first['msg']}") from None


def verify_shard(file: BinaryIO, shard: dict[str, Any], algorithm: str | None) -> str | None:
    """Compare a raw shard with its entry of the index: size, number of samples and, with an algorithm, the hash.

    Returns what differs, as a sentence fragment; None if it is as it was written.
    """
    raw = shard["raw_data"]
    size = file.seek(0, os.SEEK_END)
    if size != raw["bytes"]:
        return f"it has {size:,} bytes; the index says {raw['bytes']:,}"
    file.seek(0)
    samples = int.from_bytes(file.read(4), "little")
    if samples != shard["samples"]:
        return f"it holds {samples:,} samples; the index says {shard['samples']:,}"
    for key, own in _own_columns(file, samples).items():
        if own != shard[key]:
            return f"its {key} are {own}; the index says {shard[key]}"
    if algorithm is not None:
        file.seek(0)
        found = hashlib.file_digest(file, _hasher(algorithm)).hexdigest()  # type: ignore[arg-type]
        if found != raw["hashes"][algorithm]:
            return f"its {algorithm} is not the one in the index"
    return None


def _own_columns(file: BinaryIO, samples: int) -> dict[str, Any]:
    """The columns by the shard itself: StreamingDataset's writers keep the index's settings between offsets and samples."""
    begin = 4 * (samples + 2)
    file.seek(4)
    end = int.from_bytes(file.read(4), "little")
    file.seek(begin)
    try:
        found = parse_json(file.read(min(max(end - begin, 0), _LONGEST_SETTINGS)))
        return {key: found[key] for key in _COLUMNS if key in found}
    except (ValueError, TypeError):
        return {}


def hash_of(algorithm: str, content: bytes) -> str | None:
    """Hash of the content (hex); None for an algorithm that is not known here."""
    if algorithm not in xxhash.algorithms_available | hashlib.algorithms_guaranteed - _OF_ANY_LENGTH:
        return None
    hasher = _hasher(algorithm)()
    hasher.update(content)
    return hasher.hexdigest()


def part_fault(part: dict[str, Any], content: bytes, algorithm: str | None) -> str | None:
    """Difference between a file of a shard and its entry in the index, as a sentence fragment; None if there is none. algorithm:
    the index's `hash_algorithm`."""
    if len(content) != part["bytes"]:
        return f"it has {len(content):,} bytes; the index says {part['bytes']:,}"
    if algorithm is not None and hash_of(algorithm, content) != part["hashes"].get(algorithm):
        return f"its {algorithm} is not the one in the index"
    return None


def _hasher(algorithm: str) -> Callable[[], Any]:
    if algorithm in xxhash.algorithms_available:
        return getattr(xxhash, algorithm)
    return lambda: hashlib.new(algorithm)


_LONGEST_SETTINGS = 1 << 20
_PLAIN_NAME = re.compile(r"\w[\w.-]*", re.ASCII)


def _inside(name: str) -> str:
    if _PLAIN_NAME.fullmatch(name):
        return name
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or name in ("", ".") or str(path) != name or "\0" in name:
        raise setting_error(f"{name!r} names no file inside of the folder of the shards")
    return name


def _plain(encoding: str) -> str:
    kind = encoding.partition(":")[0]
    if kind == "pkl":
        raise setting_error("'pkl' is a pickle, which may run any code when it is read: never read here")
    if kind not in _ENCODINGS:
        raise setting_error(f"{encoding!r} is no encoding of MDS")
    return encoding


class _Part(BaseModel):
    model_config = ConfigDict(strict=True)
    basename: Annotated[str, AfterValidator(_inside)]
    bytes: NonNegativeInt
    hashes: dict[str, str]


class _Shard(BaseModel):
    model_config = ConfigDict(strict=True)
    version: Literal[2]
    format: Literal["mds"]
    column_names: list[str]
    column_encodings: list[Annotated[str, AfterValidator(_plain)]]
    column_sizes: list[NonNegativeInt | None]
    compression: str | None
    hashes: list[str]
    samples: NonNegativeInt
    raw_data: _Part
    zip_data: _Part | None

    @model_validator(mode="after")
    def _agree(self) -> _Shard:
        if not len(self.column_names) == len(self.column_encodings) == len(self.column_sizes):
            raise setting_error("column_names, column_encodings and column_sizes differ in length")
        if (self.compression is None) != (self.zip_data is None):
            raise setting_error("compression and zip_data are given together, or neither is")
        for name, encoding, size in zip(self.column_names, self.column_encodings, self.column_sizes, strict=True):
            try:
                needed = _encoded_size(encoding)
            except (_Invalid, ValueError):
                raise setting_error(f"column_encodings of the column '{name}': {encoding!r} is no encoding") from None
            if needed is not None and size != needed:
                raise setting_error(
                    f"column_sizes of '{name}' is {size}, its column_encodings is {encoding}, of {needed} bytes"
                )
        for part in (self.raw_data, self.zip_data):
            if part and (missing := set(self.hashes) - set(part.hashes)):
                raise setting_error(f"{part.basename} has no {min(missing)}, which hashes promises")
        return self


_SHARDS = TypeAdapter(list[_Shard])


_CHUNK = 4096
_DECODER = json.JSONDecoder()
_SPACE = re.compile(r"[ \t\n\r]*")


class NoSuchList(Exception):
    """The object has no such list, or has it twice."""


def list_in_chunks(text: str, name: str) -> Iterator[list[Any]]:
    """Yield the elements of the list that an object has under a name, up to 4,096 at a time. text: the object, in JSON. Raises
    NoSuchList, or ValueError for what is no JSON."""
    position = _skip(text, 0)
    if text[position : position + 1] != "{":
        json.loads(text)
        raise NoSuchList(f"it has no {name!r}")
    position, found = _skip(text, position + 1), False
    more = text[position : position + 1] != "}"
    while more:
        key, position = _DECODER.raw_decode(text, position)
        position = _expect(text, position, ":")
        if key == name and text[position : position + 1] == "[":
            if found:
                raise NoSuchList(f"it has {name!r} twice")
            found = True
            position = yield from _elements(text, _skip(text, position + 1))
        else:
            value, position = _DECODER.raw_decode(text, position)
            if key == name:
                raise NoSuchList(f"{name}: expected a list, found {type(value).__name__}")
        position = _skip(text, position)
        more = text[position : position + 1] != "}"
        position = _expect(text, position, ",") if more else position
    if _skip(text, position + 1) != len(text):
        raise json.JSONDecodeError("Extra data", text, position + 1)
    if not found:
        raise NoSuchList(f"it has no {name!r}")


def _elements(text: str, position: int) -> Generator[list[Any], None, int]:
    """The elements of a list from behind its bracket. Returns the position behind it."""
    chunk: list[Any] = []
    more = text[position : position + 1] != "]"
    while more:
        value, position = _DECODER.raw_decode(text, position)
        chunk.append(value)
        if len(chunk) == _CHUNK:
            yield chunk
            chunk = []
        position = _skip(text, position)
        more = text[position : position + 1] != "]"
        position = _expect(text, position, ",") if more else position
    yield chunk
    return position + 1


def _skip(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _expect(text: str, position: int, character: str) -> int:
    position = _skip(text, position)
    if text[position : position + 1] != character:
        raise json.JSONDecodeError(f"Expecting {character!r}", text, position)
    return _skip(text, position + 1)
