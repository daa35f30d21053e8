"""The samples of streams of token shards by their ids, each shard compared with its index before it is read."""

import functools
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from llmtrain.config.regular_file import open_regular
from llmtrain.data.loader.cached_stream import CachedStream
from llmtrain.data.shards.checks import cache_fault
from llmtrain.data.shards.fetch import ROOM
from llmtrain.data.shards.index import FLAG_COLUMN, TOKEN_COLUMNS, ShardError, verify_shard
from llmtrain.errors import UserError
from llmtrain.logs import run_log

_TOUCH_INTERVAL = 0.25
"""Seconds after which a shard that is read again is marked so again."""


class CacheRoom:
    """The room of streams' folders: of the shards there, those read longest ago are removed.

    What is there, and when it was read, stands in the folders themselves (names, sizes, times of change), so that it holds for
    all processes of a node and for other jobs, and after any of them was killed. limit: bytes of indexes and shards.
    """

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


_ATTEMPTS = 8
"""To find a shard that was there a moment ago."""


class TokenSamples:
    """Samples {tokens: int [seq_len], sample_id: int, text_bytes: int} of all streams, of conversations also flags: uint8 [seq_len]
    (packing.py). Ids number them in the order of the config;
    they are the same in every epoch and on every rank.

    A shard is compared with its index when a process first reads it: size, number of samples, hash. Processes that read from the
    same folders, of this job and of others, share nothing but these.
    """

    def __init__(
        self,
        streams: Sequence[CachedStream],
        *,
        seq_len: int,
        vocab_size: int | None = None,
        cache_limit: int | None = None,
        readers: int = 1,
    ) -> None:
        """cache_limit: bytes that the folders may hold. readers: processes of this node that read from them. Raises UserError
        where they have no room for what these read, ShardError for an index that cannot be used."""
        self.streams = list(streams)
        self.seq_len, self.vocab_size = seq_len, vocab_size
        sizes = self.shard_sizes()
        self.samples_per_stream = np.array([one.sum() for one in sizes], np.int64)
        self.sample_offset_per_stream = np.cumsum(self.samples_per_stream) - self.samples_per_stream
        self.num_samples = int(self.samples_per_stream.sum())
        self.samples_per_shard = np.concatenate(sizes)
        self._shard_ends = np.cumsum(self.samples_per_shard)
        self._stream_ends = np.cumsum([len(one) for one in sizes])
        """Shards up to the end of each stream."""
        self._room = None
        if cache_limit is not None:
            self._require_room(cache_limit, readers)
            self._room = CacheRoom(self.streams, cache_limit)
        if int(os.environ.get("LOCAL_RANK", 0)) == 0:
            for stream in self.streams:
                if stream.is_made:
                    stream.fetcher.remove_remains()
        self.beside: dict[str, NDArray] = {}
        """Further columns of batches, [num_samples, ...]: to be set before samples are read."""
        self._intact: set[int] = set()
        self._failed: dict[int, ShardError] = {}
        """Shards that could not be fetched ahead, until they are asked for."""

    @property
    def num_streams(self) -> int:
        return len(self.streams)

    def shard_sizes(self) -> list[np.ndarray]:
        """Samples of each shard, by stream."""
        return [np.asarray(stream.index.shards.samples, np.int64) for stream in self.streams]

    def _require_room(self, limit: int, readers: int) -> None:
        indexes = sum(stream.index_bytes for stream in self.streams)
        largest = max(self._bytes_of(stream).max() for stream in self.streams)
        if reason := cache_fault(limit, indexes, int(largest), readers):
            raise UserError(f"data.cache_limit = {limit}: {reason}")

    @staticmethod
    def _bytes_of(stream: CachedStream) -> np.ndarray:
        """Bytes of each shard, packed and unpacked."""
        shards = stream.index.shards
        return np.asarray(shards.raw_bytes) + np.asarray(shards.zip_bytes)

    def shards_of(self, sample_ids: np.ndarray) -> np.ndarray:
        """Numbers of the shards that hold these samples, counted over all streams."""
        return np.searchsorted(self._shard_ends, sample_ids, side="right")

    def place(self, sample_id: int) -> tuple[int, int]:
        """(number of the shard, number of the sample there). Raises IndexError if there is no such sample."""
        if not 0 <= sample_id < self.num_samples:
            raise IndexError(f"there is no sample {sample_id}")
        shard = int(np.searchsorted(self._shard_ends, sample_id, side="right"))
        return shard, int(sample_id) - (int(self._shard_ends[shard - 1]) if shard else 0)

    def _stream(self, shard: int) -> tuple[CachedStream, int]:
        """The stream of a shard, and its number there."""
        stream = int(np.searchsorted(self._stream_ends, shard, side="right"))
        return self.streams[stream], shard - (int(self._stream_ends[stream - 1]) if stream else 0)

    def get_item(self, sample_id: int) -> dict[str, Any]:
        """A sample. Raises ShardError where its shard cannot be had or is damaged, or it is not as the config says."""
        shard, row = self.place(sample_id)
        if shard not in self._intact:
            self._verify(shard)
        record = self._record(shard, row)
        tokens = next((record[name] for name in TOKEN_COLUMNS if name in record), None)
        if tokens is None:
            raise ShardError(f"sample {sample_id} has no column 'tokens' (columns: {', '.join(record)})")
        if isinstance(tokens, bytes):
            tokens = np.frombuffer(tokens, np.int64)  # LLM Foundry's older shards
        if tokens.shape != (self.seq_len,):
            raise ShardError(f"sample {sample_id} has {tokens.size} tokens, data.seq_len is {self.seq_len}")
        if self.vocab_size is not None and not 0 <= tokens.min() <= tokens.max() < self.vocab_size:
            wrong = int(tokens.max() if tokens.min() >= 0 else tokens.min())
            raise ShardError(
                f"sample {sample_id} has token {wrong}, but model.vocab_size is {self.vocab_size}: the shards were made "
                "with a larger tokenizer, or are no tokens"
            )
        sample = {"tokens": tokens, "sample_id": int(sample_id), "text_bytes": int(record.get("text_bytes", -1))}
        if (flags := record.get(FLAG_COLUMN)) is not None:
            sample["flags"] = flags
        if self.beside:
            sample["beside"] = {name: array[sample_id] for name, array in self.beside.items()}
        return sample

    def _record(self, shard: int, row: int) -> dict[str, Any]:
        stream, number = self._stream(shard)
        reader = stream.reader(number)
        for _ in range(_ATTEMPTS):
            try:
                record = reader.get_item(row)
            except FileNotFoundError:  # not there yet, or removed again
                self.prepare(shard)
                continue
            if self._room:
                self._room.touch(stream.file(number))
            return record
        raise ShardError(
            f"{self._named(shard)} cannot be had: it was removed as often as it was fetched, {_ATTEMPTS} times"
            + ("; give more data.cache_limit" if self._room else "")
        )

    def prepare(self, shard: int) -> None:
        """Have a shard in its folder, downloaded and unpacked if need be. Raises ShardError if that fails."""
        if error := self._prepared(shard, wait=True):
            raise error

    def prepare_ahead(self, shard: int) -> bool:
        """`prepare` a shard that is read later, unless another process is at it. A failure is raised when the shard is asked for.
        False after one: others are likely to fail as well."""
        if error := self._prepared(shard, wait=False):
            self._failed[shard] = error
        return error is None

    def _prepared(self, shard: int, wait: bool) -> ShardError | None:
        """`prepare` without raising. wait: for another process that makes the shard."""
        stream, number = self._stream(shard)
        failed = None

        def make_room() -> None:
            nonlocal failed
            if failed := self._failed.pop(shard, None):
                raise failed
            if self._room:
                self._room.make(int(self._bytes_of(stream)[number]))

        try:
            stream.fetcher.prepare(number, stream.index.shards[number], wait=wait, before=make_room)
        except Exception as error:  # whatever the remote's client raises
            if error is failed:
                return failed
            reason = error if isinstance(error, ShardError) else f"{type(error).__name__}: {error}"
            failure = ShardError(f"{self._named(shard)} cannot be had: {reason}")
            failure.__cause__ = error
            return failure
        if self._room:
            self._room.touch(stream.file(number))
        return None

    def _named(self, shard: int) -> str:
        stream, number = self._stream(shard)
        of = f" of the stream '{stream.name}'" if stream.name else ""
        return f"the shard {stream.file(number)}{of}"

    def _verify(self, shard: int) -> None:
        """Compare a shard with its index. One that is damaged is made again where it came from somewhere. Raises ShardError."""
        stream, number = self._stream(shard)
        entry = stream.index.shards[number]
        file, algorithm = stream.file(number), stream.index.hash_algorithm
        damage = self._damage(shard, file, entry, algorithm)
        packed = entry["zip_data"] is not None and (stream.folder / entry["zip_data"]["basename"]).is_file()
        if damage and (stream.remote or packed):
            run_log.warning(f"WARNING: {self._named(shard)} is not what its index says: {damage}; it is made again")
            file.unlink(missing_ok=True)
            damage = self._damage(shard, file, entry, algorithm)
        if damage:
            raise ShardError(
                f"{self._named(shard)} is not what its index says: {damage}; copy it anew from its source, or make it again by "
                "`llmtrain prepare` with --overwrite, unless index.json is what was changed (`llmtrain data verify "
                f"{stream.local}` reads every shard)"
            )
        self._intact.add(shard)

    def _damage(self, shard: int, file: Path, entry: dict[str, Any], algorithm: str | None) -> str | None:
        """Difference between a shard and its index, as a sentence fragment; None if there is none. Raises ShardError if the shard
        cannot be had."""
        reason = ""
        for _ in range(_ATTEMPTS):
            self.prepare(shard)
            try:
                with open_regular(file) as opened:
                    return verify_shard(opened, entry, algorithm)
            except FileNotFoundError as error:  # removed again
                reason = error.strerror
            except OSError as error:
                return f"it cannot be read: {error.strerror or error}"
        return f"it cannot be read: {reason}"
