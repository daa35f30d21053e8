"""Exact duplicates among the documents of all partitions: of equal texts, the first in the order of the input stays.

Before any shard is made, each partition's documents are read and hashed (128 bits of BLAKE2b over the text's UTF-8, or over the
ids of a token file's document); the hashes, 24 bytes a document, lie in the folder until it is complete. Those of all partitions
are compared in ranges of hashes, so that memory holds MOST_COMPARED documents of about 100 bytes at a time, and 8 bytes for each
duplicate. A text file of several partitions is compared as a whole, with other such files alone.
"""

import hashlib
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import parse_json, read_text
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.sources.records import Slice

MOST_COMPARED = 1 << 22
"""Documents that are compared at a time."""
_HASH = np.dtype([("high", "<u8"), ("low", "<u8"), ("position", "<i8")])


def position(slice_number: int, document: int) -> int:
    """The place of a document in its partition: the number of its slice, and its number there."""
    return slice_number << 40 | document


def _hashes_path(reports: Path, id: str) -> Path:
    return reports / f"{id}.hashes.npy"


def _parts_path(reports: Path, id: str) -> Path:
    return reports / f"{id}.parts"


def has_hashes(reports: Path, partition: Partition) -> bool:
    """True if the documents of a partition were hashed."""
    return _hashes_path(reports, partition.id).is_file()


class DocumentHashes:
    """Collector of the hashes of a partition's documents."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int]] = []
        self._parts: list[dict[str, Any]] = []
        self._open = hashlib.blake2b(digest_size=16)

    def mark(self) -> int:
        """The number of documents so far, to return to."""
        return len(self._rows)

    def back_to(self, mark: int) -> None:
        """Forget what came after a mark, of a slice that is set aside."""
        del self._rows[mark:]
        self._open = hashlib.blake2b(digest_size=16)

    def add_text(self, text: str) -> None:
        """Take the next piece of the open document."""
        self._open.update(text.encode())

    def add_tokens(self, ids: NDArray) -> None:
        self._open.update(b"tokens\0" + ids.astype("<u4").tobytes())

    def end(self, at: int) -> None:
        """Close a document. at: its position."""
        self._rows.append((self._open.digest(), at))
        self._open = hashlib.blake2b(digest_size=16)

    def end_part(self, part: Slice, at: int) -> None:
        """Close a part of a text file that is cut into several slices."""
        about = {"source": part.file.source, "file": part.file.name, "begin": part.begin, "position": at}
        self._parts.append(about | {"digest": self._open.hexdigest()})
        self._open = hashlib.blake2b(digest_size=16)

    def write(self, reports: Path, id: str) -> None:
        rows = np.zeros(len(self._rows), _HASH)
        digests = np.frombuffer(b"".join(digest for digest, _ in self._rows), "<u8").reshape(-1, 2)
        rows["high"], rows["low"] = digests[:, 0], digests[:, 1]
        rows["position"] = [at for _, at in self._rows]
        content = io.BytesIO()
        np.save(content, np.sort(rows, order=("high", "low", "position")))
        replace_file(_parts_path(reports, id), json.dumps(self._parts).encode("utf-8", "surrogateescape"))
        replace_file(_hashes_path(reports, id), content.getvalue())


def find_duplicates(reports: Path, partitions: Sequence[Partition]) -> list[NDArray[np.int64]]:
    """Positions of the documents to leave out of each partition, in order. All partitions' documents must have been hashed."""
    files = [np.load(_hashes_path(reports, partition.id), mmap_mode="r") for partition in partitions]
    total = sum(map(len, files))
    ranges = max(1, -(-total // MOST_COMPARED))
    edges = [number * 2**64 // ranges for number in range(1, ranges)]
    found: list[list[NDArray[np.int64]]] = [[] for _ in partitions]
    begins = [0] * len(files)
    for edge in [*edges, None]:
        rows, numbers = [], []
        for number, file in enumerate(files):
            end = len(file) if edge is None else int(np.searchsorted(file["high"], np.uint64(edge)))
            rows.append(np.array(file[begins[number] : end]))
            numbers.append(np.full(end - begins[number], number, np.int64))
            begins[number] = end
        for number, positions in _later_copies(rows, numbers):
            found[number].append(positions)
    for number, at in _copies_of_cut_files(reports, partitions):
        found[number].append(np.array([at], np.int64))
    return [np.sort(np.concatenate([np.zeros(0, np.int64), *parts])) for parts in found]


def _later_copies(rows: list[NDArray], numbers: list[NDArray[np.int64]]) -> Iterator[tuple[int, NDArray[np.int64]]]:
    """(partition, positions) of the documents that equal an earlier one."""
    row, number = np.concatenate([np.zeros(0, _HASH), *rows]), np.concatenate([np.zeros(0, np.int64), *numbers])
    order = np.lexsort((row["position"], number, row["low"], row["high"]))
    row, number = row[order], number[order]
    same = (row["high"][1:] == row["high"][:-1]) & (row["low"][1:] == row["low"][:-1])
    copies = np.flatnonzero(same) + 1
    for one in np.unique(number[copies]):
        yield int(one), row["position"][copies[number[copies] == one]]


def _copies_of_cut_files(reports: Path, partitions: Sequence[Partition]) -> Iterator[tuple[int, int]]:
    """(partition, position) of every part of a text file that equals an earlier one."""
    whole: list[tuple[Any, list[tuple[int, dict[str, Any]]]]] = []
    for number, partition in enumerate(partitions):
        text = read_text(_parts_path(reports, partition.id), errors="surrogateescape")
        for part in parse_json(text):
            key = part["source"], part["file"]
            if part["begin"] == 0 or not whole or whole[-1][0] != key:
                whole.append((key, []))
            whole[-1][1].append((number, part))
    seen = set()
    for _, parts in whole:
        digests = tuple(part["digest"] for _, part in parts)
        if digests in seen:
            yield from ((number, part["position"]) for number, part in parts)
        seen.add(digests)


def without(partition: Partition, positions: NDArray[np.int64]) -> Partition:
    """The partition without the documents at these positions: the same one, if there are none."""
    if not len(positions):
        return partition
    digest = hashlib.blake2b(partition.id.encode() + positions.astype("<i8").tobytes(), digest_size=8)
    return Partition(digest.hexdigest(), partition.slices)
