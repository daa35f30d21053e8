"""Shards of a stream brought into its folder: downloaded and unpacked, compared with the index, put there whole or not at all.

Every attempt has a temporary name of its own, content that differs from the index is fetched anew, and the processes that share a
folder, of one job or of several, take turns at a shard by a lock in a file beside it. The kernel releases the lock of a process
that ends, however it does; a holder that neither ends nor finishes is waited for for a limited time.
"""

import contextlib
import errno
import fcntl
import logging
import os
import random
import re
import shutil
import stat
import struct
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from llmtrain.config.regular_file import read_bytes
from llmtrain.data.shards.index import ShardError, parse_index, part_fault
from llmtrain.data.shards.stored_stream import unpack
from llmtrain.logs import run_log

Download = Callable[[str, str], None]
"""download(name, path): the file of that name in the remote becomes the file at that path. Raises what its client raises."""

_FIRST_WAIT, _LONGEST_WAIT = 0.5, 30.0
"""Seconds between attempts."""
_LONG_ATTEMPT = 5.0
"""Seconds from which a failed attempt is shown."""
_OF_THIS_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT}
"""Errors that another attempt would meet again."""
_NOT_THERE = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
_LOCK = ".llmtrain-lock"
"""The file in a folder that its jobs lock, a byte for each shard and two more."""
_INDEX, ROOM = 1 << 40, (1 << 40) + 1
"""The bytes for the index, and for the removal of shards."""
_TEMPORARY = re.compile(r"\.download-(?:(\d+)-)?")
"""Names of unfinished files and folders begin so, with the byte that their writer has locked."""
_UNFINISHED = 86400
"""Seconds after which a download was given up, where no lock shows whether it goes on."""
_POLL = 0.01
"""Seconds between two looks at a lock that is held."""
REMOTE = ".llmtrain-remote"
"""The file in a folder that names the remote it caches."""


@dataclass(frozen=True)
class Fetcher:
    """Fetches shards into one folder. download: None where there is no remote. hash_algorithm: None where the index has no hashes.
    retries: further attempts after one that failed. keep_packed: leave packed files beside unpacked ones. source: the remote's
    folder, for messages. patience: seconds for which the holder of a lock is waited for; then what it makes is made twice."""

    folder: Path
    download: Download | None
    hash_algorithm: str | None
    retries: int
    keep_packed: bool
    source: str = ""
    patience: float = 600.0

    def prepare(
        self, number: int, entry: dict[str, Any], *, wait: bool = True, before: Callable[[], None] = lambda: None
    ) -> None:
        """Have the unpacked file of a shard in the folder. entry: its own in the index. wait: for another process or thread that
        makes it; otherwise return while it does. before: called, with the shard locked, before it is made. Raises ShardError, or
        OSError for a disk that is full."""
        raw, packed = entry["raw_data"], entry["zip_data"]
        file = self.folder / raw["basename"]
        if not self._is_here(raw):
            file.parent.mkdir(parents=True, exist_ok=True)
            with self.alone(number, wait) as free:
                if not free:
                    return
                if not self._is_here(raw):
                    before()
                    self._make(number, raw, packed, entry["compression"])
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

    def _make(self, number: int, raw: dict[str, Any], packed: dict[str, Any] | None, compression: str | None) -> None:
        if packed is None:
            self._write(number, raw["basename"], self._downloaded(number, raw))
            return
        content, file = None, self.folder / packed["basename"]
        if self._is_here(packed):
            with contextlib.suppress(FileNotFoundError):  # removed by another job
                content = read_bytes(file)
        if content is not None and (fault := part_fault(packed, content, self.hash_algorithm)):
            if self.download is None:
                raise ShardError(
                    f"Checksum failure: {file} is not what the index says: {fault}; copy it anew from its source"
                )
            run_log.warning(f"WARNING: {file} is damaged ({fault}): it is fetched anew")
            file.unlink(missing_ok=True)
            content = None
        if content is None:
            content = self._downloaded(number, packed)
            if self.keep_packed:
                self._write(number, packed["basename"], content)
        assert compression is not None  # the index was checked
        self._write(number, raw["basename"], unpack(content, compression))

    def fetch_index(self, remote: str) -> None:
        """Have the index.json of a remote in the folder, unless there is one. Raises ShardError, or OSError as `prepare` does."""

        def fault(content: bytes) -> str | None:
            try:
                parse_index(content, self.folder)
            except ShardError as error:
                return str(error)
            return None

        file = self.folder / "index.json"
        if file.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with self.alone(_INDEX):
            if not file.exists():
                content = self._fetched(_INDEX, "index.json", fault)
                (self.folder / REMOTE).write_text(remote, encoding="utf-8")  # first: a folder with an index has it
                self._write(_INDEX, "index.json", content)

    def remove_remains(self) -> None:
        """Remove unfinished downloads of processes that have ended."""
        for folder, folders, names in os.walk(self.folder):
            for name in [*folders, *names]:
                if not (found := _TEMPORARY.match(name)):
                    continue
                path = Path(folder, name)
                with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
                    ended = self._locked(stack, int(found[1]), 0.0) if found[1] else None
                    if ended is None:
                        ended = time.time() - path.lstat().st_mtime > _UNFINISHED
                    if ended:
                        shutil.rmtree(path) if path.is_dir() else path.unlink()
            folders[:] = [name for name in folders if not _TEMPORARY.match(name)]

    def _downloaded(self, number: int, part: dict[str, Any]) -> bytes:
        return self._fetched(number, part["basename"], lambda content: part_fault(part, content, self.hash_algorithm))

    def _fetched(self, number: int, name: str, fault: Callable[[bytes], str | None]) -> bytes:
        """The content of a file of the remote, without a fault. Raises ShardError once all attempts have failed."""
        if self.download is None:
            raise ShardError(f"{self.folder / name} does not exist, and the stream has no remote")
        reason, wait = None, _FIRST_WAIT
        for attempt in range(self.retries + 1):
            began = time.monotonic()
            try:
                content = self._attempt(number, name)
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
                slow = time.monotonic() - began > _LONG_ATTEMPT
                run_log.log(
                    logging.INFO if slow else logging.DEBUG,
                    f"{self.source}{name}: attempt {attempt + 1} of {self.retries + 1} failed ({reason})",
                )
                time.sleep(wait * (0.5 + random.random()))
                wait = min(2 * wait, _LONGEST_WAIT)
        raise ShardError(f"{self.source}{name} could not be downloaded in {self.retries + 1} attempts: {reason}")

    def _attempt(self, number: int, name: str) -> bytes:
        assert self.download is not None
        with tempfile.TemporaryDirectory(dir=self.folder, prefix=f".download-{number}-") as folder:
            path = os.path.join(folder, os.path.basename(name))
            self.download(name, path)
            return read_bytes(Path(path))

    def _write(self, number: int, name: str, content: bytes) -> None:
        file = self.folder / name
        temporary = file.parent / f".download-{number}-{uuid.uuid4()}"
        try:
            temporary.write_bytes(content)
            temporary.replace(file)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise

    @contextlib.contextmanager
    def alone(self, number: int, wait: bool = True) -> Iterator[bool]:
        """A context in which no other process or thread has this byte of the folder's lock: true. False, at once, where another
        has it and `wait` is false. True as well where the file system has no such locks (at worst a shard is fetched twice)."""
        with contextlib.ExitStack() as stack:
            yield self._locked(stack, number, self.patience if wait else 0.0) is not False or wait

    def _locked(self, stack: contextlib.ExitStack, number: int, patience: float) -> bool | None:
        """Lock a byte until the stack is closed: true. False where another holds it for longer than `patience`, None where nothing
        can be locked."""
        try:
            opened = stack.enter_context(open(self.folder / _LOCK, "ab"))  # noqa: SIM115
            # A lock of the open file, as a process's own would not keep its threads apart.
            command = fcntl.F_OFD_SETLK
        except (OSError, AttributeError):
            return None
        deadline = time.monotonic() + patience
        while True:
            try:
                fcntl.fcntl(opened, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, number, 1, 0))
                break
            except OSError as error:
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    return None
            if time.monotonic() >= deadline:
                return False
            time.sleep(_POLL)
        # Not by closing alone: a process that was forked meanwhile has the file open too.
        unlock = struct.pack("hhqqi4x", fcntl.F_UNLCK, 0, number, 1, 0)
        stack.callback(fcntl.fcntl, opened, command, unlock)
        return True
