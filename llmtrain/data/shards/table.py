"""The shards of an index.json as a table that the processes of a machine share: 100,000 of them in 25 MB. No numpy, no torch here.

As Python objects they would take a hundred times as long to read, and ten times the memory, in every process. The table of a large
index is a file in the machine's folder for temporary files, named by the hash of the index, that each process maps.
"""

import contextlib
import json
import mmap
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, overload

import xxhash

from llmtrain.config.locks import locked, private_folder
from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import open_regular, parse_json
from llmtrain.errors import UserError

_VERSION = 1
_MAGIC = b"shards%02d" % _VERSION
_OWN = ("samples", "raw_data", "zip_data")
"""What differs from shard to shard; the rest of an entry is the same for many."""
_LARGE = 1 << 20
"""Bytes of an index.json from which on its table is shared."""
_PATIENCE = 60.0
"""Seconds to wait for another process that makes a table."""
_NUMBERS = ("samples", "kind", "raw_bytes", "zip_bytes", "raw_end", "zip_end")


class TableError(UserError):
    """Bytes that are no table; they are made anew."""


class ShardTable(Sequence[dict[str, Any]]):
    """Entries of an index.json, which are made when they are asked for. samples, raw_bytes, zip_bytes: of each shard, 8-byte
    integers (zip_bytes is 0 for one that is not packed). kinds: what entries have in common, each kind once.
    digest: hash of the index.json."""

    def __init__(self, content: memoryview):
        """content: what `build` returned."""
        if bytes(content[:8]) != _MAGIC:
            raise TableError("not a table of shards")
        length = int.from_bytes(content[8:16], "little")
        header = parse_json(bytes(content[16 : 16 + length]))
        self.kinds: list[dict[str, Any]] = header["kinds"]
        self.digest: str = header["digest"]
        columns, begin, count = [], _aligned(16 + length), header["count"]
        for _ in _NUMBERS:
            columns.append(content[begin : begin + 8 * count].cast("q"))
            begin += 8 * count
        self.samples, self._kind, self.raw_bytes, self.zip_bytes, self._raw_end, self._zip_end = columns
        self._raw = content[begin : begin + header["raw"]]
        self._zip = content[begin + header["raw"] : begin + header["raw"] + header["zip"]]
        if len(self._zip) != header["zip"]:
            raise TableError("the table of shards is cut off")

    @classmethod
    def build(cls, entries: Iterable[dict[str, Any]], digest: str) -> bytes:
        """The bytes of a table of valid entries."""
        kinds: dict[str, int] = {}
        columns = {name: array("q") for name in _NUMBERS}
        raw, packed = bytearray(), bytearray()
        for entry in entries:
            kind = json.dumps({name: value for name, value in entry.items() if name not in _OWN})
            raw += json.dumps(entry["raw_data"]).encode()
            if entry["zip_data"]:
                packed += json.dumps(entry["zip_data"]).encode()
            row = (
                entry["samples"],
                kinds.setdefault(kind, len(kinds)),
                entry["raw_data"]["bytes"],
                entry["zip_data"]["bytes"] if entry["zip_data"] else 0,
                len(raw),
                len(packed),
            )
            for column, value in zip(columns.values(), row, strict=True):
                column.append(value)
        header = json.dumps(
            {
                "kinds": [parse_json(kind) for kind in kinds],
                "digest": digest,
                "count": len(columns["samples"]),
                "raw": len(raw),
                "zip": len(packed),
            }
        ).encode()
        head = _MAGIC + len(header).to_bytes(8, "little") + header
        head += b"\0" * (_aligned(len(head)) - len(head))
        return b"".join([head, *(column.tobytes() for column in columns.values()), raw, packed])

    def __len__(self) -> int:
        return len(self.samples)

    @overload
    def __getitem__(self, number: int) -> dict[str, Any]: ...
    @overload
    def __getitem__(self, number: slice) -> Sequence[dict[str, Any]]: ...
    def __getitem__(self, number: int | slice) -> dict[str, Any] | Sequence[dict[str, Any]]:
        if isinstance(number, slice):
            return [self[one] for one in range(*number.indices(len(self)))]
        number = range(len(self))[number]
        return self.kinds[self._kind[number]] | {
            "samples": self.samples[number],
            "raw_data": _part(self._raw, self._raw_end, number),
            "zip_data": _part(self._zip, self._zip_end, number),
        }

    def names(self) -> Iterator[tuple[str, str | None]]:
        """The files of each shard: (unpacked, packed or None)."""
        for number in range(len(self)):
            packed = _part(self._zip, self._zip_end, number)
            yield _part(self._raw, self._raw_end, number)["basename"], packed and packed["basename"]


def _aligned(position: int) -> int:
    return -(-position // 8) * 8


def _part(texts: memoryview, ends: memoryview, number: int) -> Any:
    text = bytes(texts[ends[number - 1] if number else 0 : ends[number]])
    return parse_json(text) if text else None


def shared_table(index: bytes, read: Callable[[bytes], Iterator[dict[str, Any]]]) -> ShardTable:
    """The table of an index.json; a large one is made once on a machine. read: yields its valid entries."""
    digest = xxhash.xxh3_128_hexdigest(index)
    folder = private_folder("indexes") if len(index) >= _LARGE else None
    if folder is None:
        return ShardTable(memoryview(ShardTable.build(read(index), digest)))
    file = folder / f"{digest}.v{_VERSION}"
    with contextlib.suppress(OSError, ValueError):
        return _mapped(file)
    from filelock import Timeout  # here, because `llmtrain check` imports this file and locks nothing

    with contextlib.ExitStack() as stack:
        with contextlib.suppress(Timeout, OSError):  # at worst the table is made twice
            stack.enter_context(locked(folder / "lock", f"makes {file}", _PATIENCE))
        with contextlib.suppress(OSError, ValueError):
            return _mapped(file)
        content = ShardTable.build(read(index), digest)
        try:
            replace_file(file, content)
            return _mapped(file)
        except OSError:  # a full disk
            return ShardTable(memoryview(content))


def _mapped(file: Path) -> ShardTable:
    with open_regular(file) as opened:
        return ShardTable(memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)))
