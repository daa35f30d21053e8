"""Readers of shards as StreamingDataset wants them: a small object for each, StreamingDataset's own only for those in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from streaming.base.format.base.reader import FileInfo
from streaming.base.format.mds import MDSReader


class ShardReader:
    """A shard of a stream, without what StreamingDataset's reader takes: a kilobyte, for each of 100,000 in every process."""

    __slots__ = ("_reader", "number", "samples")

    def __init__(self, number: int, samples: int, reader: Callable[[int], MDSReader]):
        """number: of the shard in its stream. reader: StreamingDataset's reader of the shard with a number."""
        self.number, self.samples, self._reader = number, samples, reader

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._reader(self.number)[row]

    def evict(self) -> int:
        """Remove the shard's files, those that another job has not removed yet. Returns 0: TokenDataset counts the bytes."""
        for part in (self.raw_data, self.zip_data):
            if part:
                Path(self.dirname, self.split, part.basename).unlink(missing_ok=True)
        return 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader(self.number), name)


def mds_reader(local: str, split: str, entry: dict[str, Any]) -> MDSReader:
    """StreamingDataset's reader of a shard. entry: its own in the index."""
    raw, packed = (FileInfo(**part) if part else None for part in (entry["raw_data"], entry["zip_data"]))
    assert raw is not None  # the index was checked
    return MDSReader(
        dirname=local,
        split=split,
        column_encodings=entry["column_encodings"],
        column_names=entry["column_names"],
        column_sizes=entry["column_sizes"],
        compression=entry["compression"],
        hashes=entry["hashes"],
        raw_data=raw,
        samples=entry["samples"],
        size_limit=None,
        zip_data=packed,
    )
