"""The documents that a sample of a prepared folder holds: file, record and the tokens of it."""

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from llmtrain.data.partitions.prepared_folder import REPORTS
from llmtrain.data.partitions.provenance import PartitionDocuments, Sources, place_of, read_documents, read_sources
from llmtrain.data.shards.index import Index


@dataclass(frozen=True)
class SourceDocument:
    """Part of a document in a sample: its tokens [begin, end). source: as it was given to `prepare`. unit, number: `line` 12 or
    `record` 12 of the file, from 1; number is None where the file is one document.
    first: the document begins in this sample."""

    source: str
    file: str
    unit: str
    number: int | None
    begin: int
    end: int
    first: bool

    @property
    def place(self) -> str:
        """The file as one finds it: see place_of."""
        return place_of(self.source, self.file)

    def __str__(self) -> str:
        return self.place if self.number is None else f"{self.place}:{self.number}"


class SampleDocuments:
    """Look-up of the documents of samples of one split of a prepared folder.

    recorded: False for a folder of which the documents were not recorded; then every look-up is None.
    """

    def __init__(self, folder: Path | None, split: str, index: Index, seq_len: int):
        """folder: None for shards that are of none."""
        self._reports, self._split, self._seq_len = (folder or Path()) / REPORTS, split, seq_len
        sources = read_sources(self._reports) if folder is not None else None
        self.recorded = sources is not None
        self._sources = sources or Sources([], {}, {})
        before: Counter[str] = Counter()
        self._shards: list[tuple[str, int]] = []  # partition, and its samples before the shard
        for shard in index.shards:
            partition = shard["raw_data"]["basename"].partition(".")[0]
            self._shards.append((partition, before[partition]))
            before[partition] += shard["samples"]
        self._ends = np.cumsum([shard["samples"] for shard in index.shards])
        self._documents = functools.lru_cache(maxsize=4)(self._read)

    def _read(self, partition: str) -> PartitionDocuments | None:
        return read_documents(self._reports, partition) if self.recorded else None

    def partition(self, sample: int) -> str:
        """The partition that has made a sample: look-ups in its order read each partition once."""
        return self._shards[int(np.searchsorted(self._ends, sample, side="right"))][0]

    def of(self, sample: int) -> list[SourceDocument] | None:
        """The documents of a sample, by its number in the split; None where they were not recorded."""
        shard = int(np.searchsorted(self._ends, sample, side="right"))
        partition, before = self._shards[shard]
        documents = self._documents(partition)
        if documents is None:
            return None
        row = before + sample - (int(self._ends[shard - 1]) if shard else 0)
        return list(self._between(partition, documents, row * self._seq_len, (row + 1) * self._seq_len))

    def _between(self, partition: str, documents: PartitionDocuments, begin: int, end: int) -> Iterator[SourceDocument]:
        layout = documents.layout(self._split)
        for part in range(int(np.searchsorted(layout.ends, begin, side="right")), len(layout.ends)):
            stop = int(layout.ends[part])
            start = stop - int(layout.tokens[part])
            if start >= end:
                return
            number = int(layout.documents[part])
            if number >= 0:
                first = start >= begin and layout.begins[part] == 0
                yield self._document(
                    partition, documents, number, max(start, begin) - begin, min(stop, end) - begin, first
                )

    def _document(
        self, partition: str, documents: PartitionDocuments, number: int, begin: int, end: int, first: bool
    ) -> SourceDocument:
        """A document of a partition by its number, of which a sample holds the tokens [begin, end)."""
        table = documents.tables[self._split]
        place = int(table.slices[number])
        part, source = documents.slices[place], self._sources.partitions[partition][place]
        record = int(table.records[number]) + 1
        if part.unit == "line":
            record += self._sources.lines_before.get((source, part.file, part.begin), 0)
        return SourceDocument(
            self._sources.names[source],
            part.file,
            part.unit,
            None if part.unit == "file" else record,
            begin,
            end,
            bool(first) and not (part.cut and (number == 0 or table.slices[number - 1] != place)),
        )


def in_order_of_partitions(samples: Iterable[int], documents: SampleDocuments) -> list[int]:
    """The samples in an order in which each partition is read once."""
    return sorted(samples, key=lambda sample: (documents.partition(sample), sample))


def summarise(documents: Sequence[SourceDocument]) -> str:
    """The documents in a line, neighbouring records of a file as a range: `a.txt, b.jsonl:12-19`."""
    parts: list[tuple[SourceDocument, int | None]] = []
    for document in documents:
        last, end = parts[-1] if parts else (None, None)
        if last and last.place == document.place and end is not None and document.number in (end, end + 1):
            parts[-1] = last, document.number
        else:
            parts.append((document, document.number))
    return ", ".join(str(first) if end == first.number else f"{first}-{end}" for first, end in parts)
