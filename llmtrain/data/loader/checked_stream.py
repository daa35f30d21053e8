"""One stream of shards: its index, checked wherever it comes from, and the files in its folder."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
from streaming import Stream
from streaming.base.constant import TICK
from streaming.base.storage.download import CloudDownloader
from streaming.base.util import wait_for_file_to_exist

from llmtrain.data.shards.fetch import TEMPORARY, Fetcher
from llmtrain.data.shards.index import ShardError, read_index
from llmtrain.data.shards.reader import ShardReader, mds_reader
from llmtrain.logs import run_log

_READERS = 1024
_REMOTE = ".llmtrain-remote"
"""The file in a folder that says what it caches."""
_UNFINISHED = 86400
"""Seconds after which a download that is not finished was given up."""


class CheckedStream(Stream):
    """A Stream whose index is checked wherever it comes from, and that writes inside of its folder alone."""

    def __init__(self, *, name: str = "", **options: Any) -> None:
        """name: in the config, for messages."""
        super().__init__(**options)
        self.name = name

    @property
    def folder(self) -> Path:
        return Path(self.local, self.split)

    def get_shards(self, world: Any, allow_unsafe_types: bool) -> list[Any]:
        """Read the index, downloaded first if need be. Raises ShardError for one that cannot be used."""
        self._download_index(world)
        index = read_index(self.folder)
        if index is None:
            raise ShardError(f"{self.folder} holds no index.json of MDS shards")
        self.index = index
        # A flipped bit in a shard must not become training data.
        self.validate_hash = index.hash_algorithm
        if index.hash_algorithm is None:
            run_log.warning(
                f"{self.folder}: the index holds no hashes, so damage to the shards is noticed only where it changes their "
                "size; StreamingDataset's MDSWriter(hashes=['xxh64']) writes them"
            )
        self._reader = functools.lru_cache(_READERS)(
            lambda number: mds_reader(self.local, self.split, index.shards[number])
        )
        return [ShardReader(number, size, self._reader) for number, size in enumerate(index.shards.samples)]

    def _download_index(self, world: Any) -> None:
        """Get the index of a remote, where it is not in the folder; on each node its first rank does. Raises ShardError for a
        folder that caches another remote."""
        file = self.folder / "index.json"
        if not self.remote:
            return
        if not file.exists():
            if world.is_local_leader:
                self.fetcher.fetch_index()
                (self.folder / _REMOTE).write_text(self.remote, encoding="utf-8")
            else:
                longest = self.download_timeout * (self.download_retry + 1)
                wait_for_file_to_exist(str(file), TICK, longest, f"{file} was not downloaded in time")
        with contextlib.suppress(FileNotFoundError):
            of = (self.folder / _REMOTE).read_text(encoding="utf-8")
            if of.rstrip("/") != self.remote.rstrip("/"):
                raise ShardError(
                    f"{self.folder} caches {of}, not {self.remote}: give another folder as local, or remove this one"
                )

    @property
    def fetcher(self) -> Fetcher:
        """Fetches shards into the folder; before the index was read, without their hashes."""
        return Fetcher(
            self.folder,
            self._download if self.remote else None,
            self.validate_hash or None,
            self.download_retry,
            self.safe_keep_zip,
            os.path.join(self.remote, self.split, "") if self.remote else "",
        )

    def _download(self, name: str, path: str) -> None:
        clients = self.__dict__.setdefault(
            "_clients", threading.local()
        )  # a failed one is replaced, not under another thread
        if not hasattr(clients, "own"):
            clients.own = CloudDownloader.get(self.remote)
        try:
            clients.own.download(os.path.join(self.remote or "", self.split, name), path, self.download_timeout)
        except BaseException:
            clients.own.clean_up()
            raise

    def set_up_local(self, shards: list[Any], cache_usage_per_shard: np.ndarray) -> None:
        """Find which shards are in the folder, and how many bytes. Unlike StreamingDataset, which deletes files that it would
        not have left so, those of another job among them; only unfinished downloads of yesterday are removed."""
        here = set()
        for folder, _, files in os.walk(self.folder):
            inside = os.path.relpath(folder, self.folder)
            here |= {os.path.normpath(os.path.join(inside, name)) for name in files}
        for name in (name for name in here if TEMPORARY in name):
            with contextlib.suppress(OSError):
                if time.time() - os.stat(self.folder / name).st_mtime > _UNFINISHED:
                    os.unlink(self.folder / name)
        table = self.index.shards
        if len(here) > 1:
            for number, (raw, packed) in enumerate(table.names()):
                cache_usage_per_shard[number] = (raw in here and table.raw_bytes[number]) + (
                    packed in here and table.zip_bytes[number]
                )

    def prepare_shard(self, shard: Any) -> int:
        """Download and unpack a shard. Returns 0: the bytes in the folder are counted by TokenDataset. Raises ShardError for what
        is no file (a pipe would block), and where a link would lead what is written out of the folder."""
        self.fetcher.prepare(shard.number, self.index.shards[shard.number])
        return 0
