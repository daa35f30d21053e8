"""The documents behind the tokens of a partition: for each, in the order of its tokens, the file, the record and the length.

A file of arrays lies beside each partition's report; `sources` says from which source each of its files is. They cost about
three bytes per document on the disk, and 27 bytes of memory while a partition is made.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.output_folder import replace_file
from llmtrain.config.regular_file import parse_json, read_bytes, read_text
from llmtrain.data.partitions.array_file import pack_arrays, unpack_arrays
from llmtrain.data.partitions.cutting import Partition
from llmtrain.data.shards.best_fit import Layout
from llmtrain.data.sources.files import PrepareError
from llmtrain.data.sources.records import Slice
from llmtrain.data.sources.storage import fixed_folder, has_pattern

SOURCES = "sources"
"""File with the sources of all partitions, beside their reports."""
_LAYOUT = ("documents", "begins", "tokens")


@dataclass(frozen=True)
class SourceSlice:
    """Part of a file that a partition has read. unit: what a record's number counts: `line`, `record`, `document` or, where the
    file is one document, `file`. records: lines that begin in the slice. text_bytes: of its documents, by split. cut: what there is
    of its first document is not the beginning."""

    file: str
    begin: int
    unit: str
    records: int
    text_bytes: dict[str, int]
    cut: bool = False


@dataclass(frozen=True)
class DocumentTable:
    """Documents of a split of a partition, in the order of their tokens. All int64 [documents]; records count from the slice's
    first, from 0."""

    slices: NDArray[np.int64]
    records: NDArray[np.int64]
    tokens: NDArray[np.int64]

    @functools.cached_property
    def concatenated(self) -> Layout:
        """The layout of its documents one after another."""
        return Layout(np.arange(len(self.tokens)), np.zeros_like(self.tokens), self.tokens)

    def __getitem__(self, part: slice) -> DocumentTable:
        return DocumentTable(self.slices[part], self.records[part], self.tokens[part])

    def tail(self, tokens: int) -> DocumentTable:
        """The documents of the last so many tokens; the first one may be cut."""
        begin, ends = int(self.tokens.sum()) - tokens, self.concatenated.ends
        first = int(np.searchsorted(ends, begin, side="right"))
        found = self[first:]
        counts = found.tokens.copy()
        if len(counts):
            counts[0] = ends[first] - begin
        return DocumentTable(found.slices, found.records, counts)


@dataclass(frozen=True)
class PartitionDocuments:
    """The documents of a partition. tables: by split. layouts: by split, where they were not simply concatenated."""

    slices: list[SourceSlice]
    tables: dict[str, DocumentTable]
    layouts: dict[str, Layout] = field(default_factory=dict)

    def layout(self, split: str) -> Layout:
        """Layout of the documents in the samples of a split; a document may go on in further samples."""
        return self.layouts.get(split) or self.tables[split].concatenated


def documents_path(reports: Path, id: str) -> Path:
    """The file about a partition's documents. reports: the folder of all reports."""
    path = reports / f"{id}.documents"
    earlier = reports / f"{id}.documents.npz"
    return earlier if earlier.is_file() and not path.is_file() else path


def read_documents(reports: Path, id: str) -> PartitionDocuments | None:
    """The documents of a partition; None where they were not recorded. Raises PrepareError for a damaged file."""
    path = documents_path(reports, id)
    try:
        arrays = unpack_arrays(read_bytes(path))
        content = parse_json(arrays["slices"].tobytes().decode("utf-8", "surrogateescape"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError) as error:
        raise PrepareError(f"{path} is damaged: {error}; make the folder anew with --overwrite") from error
    tables = {}
    for name in content["splits"]:
        counts = arrays[f"counts_{name}"]
        slices = np.repeat(np.arange(len(counts)), counts)
        records = np.cumsum(arrays[f"records_{name}"], dtype=np.int64)
        tables[name] = DocumentTable(slices, records, arrays[f"tokens_{name}"].astype(np.int64))
    layouts = {
        name: Layout(*(arrays[f"layout_{column}_{name}"].astype(np.int64) for column in _LAYOUT))
        for name in content["splits"]
        if f"layout_tokens_{name}" in arrays
    }
    return PartitionDocuments([SourceSlice(**entry) for entry in content["slices"]], tables, layouts)


def write_documents(reports: Path, id: str, documents: PartitionDocuments) -> None:
    """Write the documents of a partition."""
    listed = {"splits": list(documents.tables), "slices": [vars(part) for part in documents.slices]}
    arrays: dict[str, NDArray] = {
        "slices": np.frombuffer(json.dumps(listed, ensure_ascii=False).encode("utf-8", "surrogateescape"), np.uint8)
    }
    for name, table in documents.tables.items():
        arrays |= {
            f"counts_{name}": np.bincount(table.slices, minlength=len(documents.slices)),
            f"records_{name}": _narrow(np.diff(table.records, prepend=0)),
            f"tokens_{name}": _narrow(table.tokens),
        }
    for name, layout in documents.layouts.items():
        arrays |= {f"layout_{column}_{name}": _narrow(getattr(layout, column)) for column in _LAYOUT}
    replace_file(documents_path(reports, id), pack_arrays(arrays))


def _narrow(values: NDArray[np.int64]) -> NDArray:
    """The same numbers in 32 bits, where they fit."""
    fits = not len(values) or (values.min() >= -(2**31) and values.max() < 2**31)
    return values.astype(np.int32) if fits else values


class DocumentRecorder:
    """Collector of a partition's documents."""

    def __init__(self, splits: Sequence[str]) -> None:
        self._slices: list[dict[str, Any]] = []
        self._columns = {name: (array("q"), array("q"), array("q")) for name in splits}

    def begin(self, part: Slice) -> int:
        """Open a slice. Returns its number."""
        about = {"file": part.file.name, "begin": part.begin, "unit": "file", "records": 0}
        self._slices.append(about | {"text_bytes": dict.fromkeys(self._columns, 0)})
        return len(self._slices) - 1

    def tell(self, number: int, unit: str, records: int) -> None:
        """Note the unit and the lines of a slice: see SourceSlice."""
        about = self._slices[number]
        about |= {"unit": unit, "records": records, "cut": unit == "file" and about["begin"] > 0}

    def add(
        self,
        split: str,
        numbers: NDArray[np.int64],
        records: NDArray[np.int64],
        tokens: NDArray[np.int64],
        text_bytes: NDArray[np.int64],
    ) -> None:
        """Note pieces of documents in their order, all [pieces]: the slice and the record of each, its tokens and its bytes.
        Pieces of one record that follow one another, also over calls, are one document."""
        if not len(numbers):
            return
        firsts = np.flatnonzero((np.diff(numbers, prepend=-1) != 0) | (np.diff(records, prepend=-1) != 0))
        rows = [numbers[firsts], records[firsts], np.add.reduceat(tokens, firsts)]
        slices, known, counts = columns = self._columns[split]
        if slices and (slices[-1], known[-1]) == (rows[0][0], rows[1][0]):
            counts[-1] += int(rows[2][0])
            rows = [values[1:] for values in rows]
        for column, values in zip(columns, rows, strict=True):
            column.frombytes(values.tobytes())
        found, places = np.unique(numbers, return_inverse=True)
        for number, nbytes in zip(found.tolist(), np.bincount(places, text_bytes).tolist(), strict=True):
            self._slices[number]["text_bytes"][split] += int(nbytes)

    def documents(self, layouts: dict[str, Layout]) -> PartitionDocuments:
        tables = {
            name: DocumentTable(*(np.array(column, dtype=np.int64) for column in columns))
            for name, columns in self._columns.items()
        }
        return PartitionDocuments([SourceSlice(**about) for about in self._slices], tables, layouts)


def place_of(source: str, file: str) -> str:
    """A file of a source as one finds it: below a folder that was given, or below the last folder of a glob without a wildcard."""
    source = source.rstrip("/")
    if has_pattern(source) and not Path(source).exists():
        return os.path.join(fixed_folder(source), file)
    return source if source.rpartition("/")[2] == file else f"{source}/{file}"


class MergedDocuments:
    """Collector, partition by partition, of the sources of all slices, and of the documents of what the partitions leave over,
    which is packed when they are merged."""

    def __init__(self, sources: Sequence[str]) -> None:
        """sources: as they were given."""
        self._sources = sources
        self._partitions: dict[str, list[tuple[int, int]]] = {}
        self._lines: dict[tuple[int, str], int] = {}
        self._lines_before: list[tuple[int, str, int, int]] = []
        self._rest_slices: list[tuple[int, SourceSlice]] = []
        self._rests: dict[str, list[DocumentTable]] = {}

    def begin(self, id: str, partition: Partition, documents: PartitionDocuments) -> None:
        """Open a partition, with the documents that were made of it. id: of its report."""
        self._documents = documents
        self._of_slice = [part.file.source for part in partition.slices[: len(documents.slices)]]
        self._partitions[id] = _runs(self._of_slice)
        self._before: list[int] = []  # lines, of each slice
        for source, part in zip(self._of_slice, documents.slices, strict=True):
            before = self._lines.get((source, part.file), 0) if part.begin else 0
            self._before.append(before)
            if before:
                self._lines_before.append((source, part.file, part.begin, before))
            if part.unit == "line":
                self._lines[source, part.file] = before + part.records

    def place(self, number: int, record: int) -> str:
        """Path and record of a document of the open partition. number: of its slice; record: as in the tables."""
        part = self._documents.slices[number]
        place = place_of(self._sources[self._of_slice[number]], part.file)
        return place if part.unit == "file" else f"{place}:{self._before[number] + record + 1}"

    def add_rest(self, split: str, tokens: int, closing: int) -> None:
        """Note the last `tokens` of the open partition's split, and end-of-document tokens that were added behind them."""
        table = self._documents.tables[split]
        if not len(table.tokens):
            return
        rest = table.tail(tokens)
        whole = len(rest.tokens) and rest.tokens[0] == table.tokens[-len(rest.tokens)]
        self._add_rest(split, rest[: 0 if whole else 1], cut=True)
        self._add_rest(split, rest[0 if whole else 1 :], cut=False)
        last = table[-1:]
        self._add_rest(split, DocumentTable(last.slices, last.records, np.full(1, closing, np.int64)), cut=True)

    def _add_rest(self, split: str, part: DocumentTable, cut: bool) -> None:
        if part.tokens.sum():
            used, slices = np.unique(part.slices, return_inverse=True)
            self._rests.setdefault(split, []).append(
                DocumentTable(slices + len(self._rest_slices), part.records, part.tokens)
            )
            self._rest_slices += [
                (self._of_slice[number], replace(self._documents.slices[number], cut=cut)) for number in used
            ]

    def write(self, reports: Path, rests: str, splits: Sequence[str]) -> None:
        """Write the file of sources, and the documents of the shards `rests`."""
        tables = {}
        for name in splits:
            parts = self._rests.get(name, [])
            columns = [[getattr(part, column) for part in parts] for column in ("slices", "records", "tokens")]
            tables[name] = DocumentTable(*(np.concatenate([np.zeros(0, np.int64), *column]) for column in columns))
        write_documents(reports, rests, PartitionDocuments([part for _, part in self._rest_slices], tables))
        content = {
            "sources": list(self._sources),
            "partitions": self._partitions | {rests: _runs([source for source, _ in self._rest_slices])},
            "lines_before": self._lines_before,
        }
        replace_file(reports / SOURCES, json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogateescape"))


def _runs(values: Sequence[int]) -> list[tuple[int, int]]:
    """(value, times in a row)."""
    return [(value, len(list(group))) for value, group in itertools.groupby(values)]


@dataclass(frozen=True)
class Sources:
    """Content of the file of sources. names: as they were given."""

    names: list[str]
    partitions: dict[str, list[int]]
    """Number of the source of each slice."""
    lines_before: dict[tuple[int, str, int], int]
    """Lines of a file before the first one that begins in a slice: by source, file and first byte of the slice."""


def read_sources(reports: Path) -> Sources | None:
    """The sources of a prepared folder; None where they were not recorded. Raises PrepareError for a damaged file."""
    try:
        content = parse_json(read_text(reports / SOURCES, errors="surrogateescape"))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise PrepareError(f"{reports / SOURCES} is damaged: {error}; make the folder anew with --overwrite") from error
    partitions = {
        id: [source for source, count in runs for _ in range(count)] for id, runs in content["partitions"].items()
    }
    before = {(source, file, begin): lines for source, file, begin, lines in content["lines_before"]}
    return Sources(content["sources"], partitions, before)
