"""Shards of a stream brought into its folder: downloaded and unpacked, compared with the index, put there whole or not at all.

StreamingDataset downloads to the file's own name, takes a failed hash for final, and unpacks to one temporary name for all: here
every attempt has a name of its own, content that is not what the index says is fetched anew, and jobs that share a folder take
turns at a shard.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import stat
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.data.shards.index import ShardError, hash_of, parse_index
from llmtrain.data.shards.stored_stream import unpack
from llmtrain.logs import run_log

Download = Callable[[str, str], None]
"""download(name, path): the file of that name in the remote becomes the file at that path. Raises what its client raises."""

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts."""
_OF_THIS_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
"""Errors that another attempt would meet again."""
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_LOCK = ".llmtrain-lock"
"""The file in a folder that its jobs lock, a byte for each shard."""
TEMPORARY = ".download-"
"""What names of unfinished files begin with."""


@dataclass(frozen=True)
class Fetcher:
    """Fetches shards into one folder. download: None where there is no remote. hash_algorithm: None where the index has no hashes.
    retries: further attempts after one that failed. keep_packed: leave packed files beside unpacked ones. source: the remote's
    folder, for messages."""

    folder: Path
    download: Download | None
    hash_algorithm: str | None
    retries: int
    keep_packed: bool
    source: str = ""

    def prepare(self, number: int, entry: dict[str, Any]) -> None:
        """Have the unpacked file of a shard in the folder. entry: its own in the index. Raises ShardError, or OSError for a disk
        that is full."""
        raw, packed = entry["raw_data"], entry["zip_data"]
        file = self.folder / raw["basename"]
        if not self._is_here(raw):
            file.parent.mkdir(parents=True, exist_ok=True)
            with self._alone(number):
                if not self._is_here(raw):
                    self._make(raw, packed, entry["compression"])
        if packed and not self.keep_packed:
            (self.folder / packed["basename"]).unlink(missing_ok=True)

    def _is_here(self, part: dict[str, Any]) -> bool:
        """Raises ShardError for what is no file (a pipe would block), and where a link would lead what is written elsewhere."""
        file = self.folder / part["basename"]
        try:
            mode = file.stat().st_mode  # once: another job may remove it, or put it there, at any time
        except OSError as error:
            if error.errno not in _NOT_THERE:
                raise
        else:
            if stat.S_ISREG(mode):
                return True
            raise ShardError(f"{file} is not a regular file")
        folder = os.path.realpath(self.folder)
        if not os.path.realpath(file).startswith(f"{folder}{os.sep}"):
            raise ShardError(f"{file} is a link that leads out of {folder}: nothing is written there")
        return False

    def _make(self, raw: dict[str, Any], packed: dict[str, Any] | None, compression: str | None) -> None:
        if packed is None:
            self._write(raw["basename"], self._downloaded(raw))
            return
        content, file = None, self.folder / packed["basename"]
        if self._is_here(packed):
            with contextlib.suppress(FileNotFoundError):  # removed by another job
                content = file.read_bytes()
        if content is not None and (fault := self._fault(packed, content)):
            if self.download is None:
                raise ShardError(
                    f"Checksum failure: {file} is not what the index says: {fault}; copy it anew from its source"
                )
            run_log.warning(f"WARNING: {file} is damaged ({fault}): it is fetched anew")
            file.unlink(missing_ok=True)
            content = None
        if content is None:
            content = self._downloaded(packed)
            if self.keep_packed:
                self._write(packed["basename"], content)
        assert compression is not None  # the index was checked
        self._write(raw["basename"], unpack(content, compression))

    def fetch_index(self) -> None:
        """Have the index.json of the remote in the folder. Raises ShardError, or OSError as `prepare` does."""

        def fault(content: bytes) -> str | None:
            try:
                parse_index(content, self.folder)
            except ShardError as error:
                return str(error)
            return None

        self.folder.mkdir(parents=True, exist_ok=True)
        self._write("index.json", self._fetched("index.json", fault))

    def _downloaded(self, part: dict[str, Any]) -> bytes:
        return self._fetched(part["basename"], lambda content: self._fault(part, content))

    def _fetched(self, name: str, fault: Callable[[bytes], str | None]) -> bytes:
        """The content of a file of the remote, without a fault. Raises ShardError once all attempts have failed."""
        if self.download is None:
            raise ShardError(f"{self.folder / name} does not exist, and the stream has no remote")
        reason, wait = None, _FIRST_WAIT
        for attempt in range(self.retries + 1):
            try:
                content = self._attempt(name)
                reason = fault(content)
            except ImportError as error:
                raise ShardError(
                    f"{self.source}{name} cannot be downloaded: the store's client is not installed ({error})"
                ) from error
            except Exception as error:  # whatever the remote's client raises
                content, reason = b"", f"{type(error).__name__}: {error}"
                if isinstance(error, OSError) and error.errno in _OF_THIS_MACHINE:
                    raise
            if reason is None:
                return content
            if attempt < self.retries:
                run_log.debug(f"{name}: attempt {attempt + 1} failed ({reason})")
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, _LONGEST_WAIT)
        raise ShardError(f"{self.source}{name} could not be downloaded in {self.retries + 1} attempts: {reason}")

    def _attempt(self, name: str) -> bytes:
        assert self.download is not None
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=TEMPORARY) as folder:
            path = os.path.join(folder, os.path.basename(name))
            self.download(name, path)
            return Path(path).read_bytes()

    def _fault(self, part: dict[str, Any], content: bytes) -> str | None:
        """Difference between a file and the index, as a sentence fragment; None if there is none."""
        if len(content) != part["bytes"]:
            return f"it has {len(content):,} bytes; the index says {part['bytes']:,}"
        algorithm = self.hash_algorithm
        if algorithm is not None and hash_of(algorithm, content) != part["hashes"].get(algorithm):
            return f"its {algorithm} is not the one in the index"
        return None

    def _write(self, name: str, content: bytes) -> None:
        file = self.folder / name
        temporary = file.parent / f"{TEMPORARY}{uuid.uuid4()}"
        try:
            temporary.write_bytes(content)
            temporary.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    @contextlib.contextmanager
    def _alone(self, number: int) -> Iterator[None]:
        """No other process or thread prepares this shard meanwhile; one that ends, however it does, is waited for no longer."""
        with contextlib.ExitStack() as stack:
            try:
                opened = stack.enter_context(open(self.folder / _LOCK, "ab"))
                # A lock of the open file, as a process's own would not keep its threads apart.
                fcntl.fcntl(opened, fcntl.F_OFD_SETLKW, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, number, 1, 0))
            except (OSError, AttributeError):
                pass  # a file system, or a machine, without such locks: at worst a shard is fetched twice
            yield
