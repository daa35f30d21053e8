"""One checkpoint, from a disk to a store: its files first, its manifest last, so that it is seen only when it is whole."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, FileRecord, Manifest
from llmtrain.checkpoint.remote.bucket import Bucket

_THREADS = 8

Progress = Callable[[int], None]


class GoneError(CheckpointError):
    """The run has deleted the checkpoint before its upload began."""


@dataclass(frozen=True)
class Uploaded:
    """What an upload did. sent: bytes over the wire, without what was there already."""

    url: str
    nbytes: int
    sent: int
    seconds: float


def upload(bucket: Bucket, folder: Path, *, progress: Progress = lambda size: None) -> Uploaded:
    """Brings a complete checkpoint into the store, under its step. What is there already is not sent again.

    The files are held open from the start: the run may delete the checkpoint meanwhile.
    progress: is told the bytes of each piece that is sent.
    Raises GoneError; RemoteError when the store fails, CheckpointError when the checkpoint is not whole. The store then
    shows what it showed before, or, if it had another save of this step, nothing under this name.
    """
    began = time.monotonic()
    counter = _Counter(progress)
    with contextlib.ExitStack() as stack:
        text, manifest, files = _open(folder, stack)
        prefix = f"{manifests.folder_name(manifest.step)}/"
        own = files.pop(manifests.NAME)
        digest = xxhash.xxh3_128_hexdigest(text)
        if missing := manifest.files.keys() - files.keys():
            raise CheckpointError(f"{folder} is incomplete: {min(missing)} is missing")
        if not bucket.holds(prefix + manifests.NAME, len(text), digest):
            bucket.delete(prefix + manifests.NAME)  # of another save of this step, whose files are about to change
            send(bucket, prefix, files, manifest.files, counter.add)
            bucket.put(prefix + manifests.NAME, own, len(text), digest, counter.add)
        for name in bucket.sizes(prefix):  # what an earlier save of this step had more
            if name.removeprefix(prefix) not in {manifests.NAME, *manifest.files}:
                bucket.delete(name)
        bucket.abandon(prefix)
    return Uploaded(f"{bucket.url}/{prefix[:-1]}", manifest.nbytes, counter.total, time.monotonic() - began)


def send(
    bucket: Bucket, prefix: str, files: Mapping[str, BinaryIO], records: Mapping[str, FileRecord], progress: Progress
) -> None:
    """Files, several at a time; those that the store has with this size and hash are passed over."""
    failed = threading.Event()

    def send_one(name: str) -> None:
        size, digest = records[name]["bytes"], records[name]["xxh3_128"]
        if not failed.is_set() and not bucket.holds(prefix + name, size, digest):
            bucket.put(prefix + name, files[name], size, digest, progress)

    with ThreadPoolExecutor(_THREADS, "upload") as pool:
        futures = [pool.submit(send_one, name) for name in files]
        try:
            for future in futures:
                future.result()
        finally:
            failed.set()


def _open(folder: Path, stack: contextlib.ExitStack) -> tuple[bytes, Manifest, dict[str, BinaryIO]]:
    """The manifest's text, the manifest, and every file of it that is here (itself among them), open.

    All through one handle of the folder: whatever is renamed meanwhile, they are of one save.
    """
    try:
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    except OSError:
        raise GoneError(f"{folder} was deleted before it was uploaded") from None
    stack.callback(os.close, handle)

    def open_file(name: str) -> BinaryIO:
        return stack.enter_context(open(name, "rb", opener=lambda path, flags: os.open(path, flags, dir_fd=handle)))

    try:
        own = open_file(manifests.NAME)
    except OSError:
        raise GoneError(f"{folder} was deleted before it was uploaded") from None
    text = own.read()
    manifest = manifests.parse(folder, text)
    files = {manifests.NAME: own}
    for name in manifest.files:
        with contextlib.suppress(FileNotFoundError):
            files[name] = open_file(name)
    if not folder.is_dir():  # its files may be some of those it had
        raise GoneError(f"{folder} was deleted before it was uploaded")
    return text, manifest, files


class _Counter:
    """Adds up what the threads report."""

    def __init__(self, progress: Progress):
        self.total = 0
        self._progress = progress
        self._lock = threading.Lock()

    def add(self, size: int) -> None:
        with self._lock:
            self.total += size
            self._progress(size)
