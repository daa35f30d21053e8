"""One stream of MDS shards: its index, checked wherever it comes from, and the shards in its folder, fetched where missing."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from streaming.base.format.base.reader import FileInfo
from streaming.base.format.mds import MDSReader
from streaming.base.storage.download import CloudDownloader

from llmtrain.config.regular_file import read_text
from llmtrain.data.shards.fetch import REMOTE, Fetcher
from llmtrain.data.shards.index import Index, ShardError, read_index
from llmtrain.logs import run_log
from llmtrain.schema.data import DataConfig, StreamConfig

_READERS = 1024
"""Shards of which a process keeps StreamingDataset's reader: a kilobyte each."""


@dataclass
class CachedStream:
    """A stream of the config. name: for messages, in the config. local, split: its folder. remote: where its shards come from.
    retries, timeout (seconds): of a download."""

    name: str
    local: str
    remote: str | None
    split: str
    retries: int = 4
    timeout: float = 120.0
    _clients: threading.local = field(default_factory=threading.local, init=False, repr=False)

    @classmethod
    def of(cls, name: str, config: StreamConfig, data: DataConfig) -> CachedStream:
        local, split = os.path.expanduser(config.local), config.split or ""
        return cls(name, local, config.remote, split, data.download_retries, data.download_timeout)

    @property
    def folder(self) -> Path:
        return Path(self.local, self.split)

    @functools.cached_property
    def index(self) -> Index:
        """The index, downloaded first if need be. Raises ShardError for one that cannot be used, and for a folder that caches
        another remote."""
        if self.remote:
            self._fetcher(None).fetch_index(self.remote)
            with contextlib.suppress(FileNotFoundError):
                of = read_text(self.folder / REMOTE)
                if of.rstrip("/") != self.remote.rstrip("/"):
                    raise ShardError(
                        f"{self.folder} caches {of}, not {self.remote}: give another folder as local, or remove this one"
                    )
        index = read_index(self.folder)
        if index is None:
            raise ShardError(f"{self.folder} holds no index.json of MDS shards")
        if not index.samples:
            raise ShardError(f"{self.folder} holds no samples")
        if fault := index.token_fault():
            raise ShardError(f"{self.folder}/index.json: {fault}")
        if index.hash_algorithm is None:
            run_log.warning(
                f"{self.folder}: the index holds no hashes, so damage to the shards is noticed only where it changes their "
                "size; StreamingDataset's MDSWriter(hashes=['xxh64']) writes them"
            )
        return index

    @property
    def index_bytes(self) -> int:
        return (self.folder / "index.json").stat().st_size

    @functools.cached_property
    def is_made(self) -> bool:
        """True if shards come into the folder while they are read: downloaded, or unpacked."""
        return self.remote is not None or any(self.index.shards.zip_bytes)

    @functools.cached_property
    def reader(self) -> Callable[[int], MDSReader]:
        """StreamingDataset's reader of the shard with a number."""

        def make(number: int) -> MDSReader:
            entry = self.index.shards[number]
            raw, packed = (FileInfo(**part) if part else None for part in (entry["raw_data"], entry["zip_data"]))
            assert raw is not None  # the index was checked
            return MDSReader(
                dirname=self.local,
                split=self.split,
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

        return functools.lru_cache(_READERS)(make)

    def file(self, number: int) -> Path:
        """The unpacked file of a shard, which may not be there."""
        return self.folder / self.reader(number).raw_data.basename

    @functools.cached_property
    def fetcher(self) -> Fetcher:
        """Fetches shards into the folder."""
        return self._fetcher(self.index.hash_algorithm)

    def _fetcher(self, hash_algorithm: str | None) -> Fetcher:
        return Fetcher(
            self.folder,
            self._download if self.remote else None,
            hash_algorithm,
            self.retries,
            keep_packed=self.remote in (None, self.local),
            source=os.path.join(self.remote, self.split, "") if self.remote else "",
            patience=2 * self.timeout * (self.retries + 1),
        )

    def _download(self, name: str, path: str) -> None:
        clients: Any = self._clients  # one of each thread: a failed one is replaced, not under another thread
        os.environ.setdefault(
            "AWS_MAX_ATTEMPTS", "1"
        )  # Fetcher tries again; botocore's own five would each take `timeout`
        if not hasattr(clients, "own"):
            clients.own = CloudDownloader.get(self.remote)
        try:
            clients.own.download(os.path.join(self.remote or "", self.split, name), path, self.timeout)
        except BaseException:
            clients.own.clean_up()
            raise
