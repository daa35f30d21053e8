"""Readers of shards as StreamingDataset wants them: a small object for each, StreamingDataset's own only for those in use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from streaming.base.format.base.reader import FileInfo
from streaming.base.format.mds import MDSReader


class ShardReader:
    """A shard of a stream, without what StreamingDataset's reader takes: a kilobyte, for each of 100,000 in every process."""

    __slots__ = ("_number", "_reader", "samples")

    def __init__(self, number: int, samples: int, reader: Callable[[int], MDSReader]):
        """reader: StreamingDataset's reader of the shard with a number in the stream."""
        self._number, self.samples, self._reader = number, samples, reader

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, row: int) -> dict[str, Any]:
        return self._reader(self._number)[row]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader(self.number), name)

    @property
    def number(self) -> int:
        """Number of the shard in its stream."""
        return self._number


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
