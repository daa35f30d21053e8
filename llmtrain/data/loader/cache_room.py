"""Room in the folders of remote streams: of the shards there, those read longest ago are removed.

What is there, and when it was read, stands in the folders themselves (names, sizes, times of change), so that it holds for all
processes of a node and for other jobs, and after any of them was killed.
"""

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path

from llmtrain.data.loader.cached_stream import CachedStream
from llmtrain.data.shards.fetch import ROOM

_TOUCH_INTERVAL = 0.25
"""Seconds after which a shard that is read again is marked so again."""


class CacheRoom:
    """The room of streams' folders. limit: bytes of indexes and shards that they may hold."""

    def __init__(self, streams: Sequence[CachedStream], limit: int):
        self._streams, self._limit = streams, limit
        self._touched: dict[Path, float] = {}

    def touch(self, file: Path) -> None:
        """Mark a shard's file as read now."""
        now = time.monotonic()
        if now - self._touched.get(file, 0.0) > _TOUCH_INTERVAL:
            self._touched[file] = now
            try:
                os.utime(file)
            except OSError:
                del self._touched[file]  # removed meanwhile, or of another user

    def make(self, needed: int) -> None:
        """Remove shards until so many bytes more are within the limit, or none is left. Raises OSError for one that cannot be."""
        with self._streams[0].fetcher.alone(ROOM):
            kept = [found for stream, names in self._names for found in _shards(stream.folder, names)]
            excess = sum(size for _, size, _ in kept) + self._indexes + needed - self._limit
            for _, size, file in sorted(kept):
                if excess <= 0:
                    break
                file.unlink(missing_ok=True)
                excess -= size

    @functools.cached_property
    def _indexes(self) -> int:
        return sum(stream.index_bytes for stream in self._streams)

    @functools.cached_property
    def _names(self) -> list[tuple[CachedStream, set[str]]]:
        """The files that each stream's index names: others are not ours to remove."""
        return [
            (stream, {name for names in stream.index.shards.names() for name in names if name})
            for stream in self._streams
        ]


def _shards(folder: Path, names: set[str]) -> list[tuple[int, int, Path]]:
    """(time of change in ns, bytes, file) of the files with these names."""
    found = []
    for inside, _, files in os.walk(folder):
        for name in files:
            file = Path(inside, name)
            if os.path.relpath(file, folder) in names:
                try:
                    about = file.stat()
                except FileNotFoundError:  # another job removes them too
                    continue
                found.append((about.st_mtime_ns, about.st_size, file))
    return found
