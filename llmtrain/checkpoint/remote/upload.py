"""One checkpoint, from a disk to a store: its files first, its manifest last, so that it is seen only when it is whole.

Nodes that share no file system each have some of the files. Rank 0, which has the manifest, then leaves it in the store
as a request; the other nodes send what it lists and they have (`answer`), and rank 0 waits to see it arrive. So the nodes
agree through the store alone: no collective runs beside the training's.
"""

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
from llmtrain.checkpoint.remote.bucket import Bucket, RemoteError

REQUEST = "request.json"
"""The manifest, before all files are there: what other nodes are asked for. No reader takes it for one."""
_THREADS = 8
_LOOK_SECONDS = 2.0

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


def upload(
    bucket: Bucket, folder: Path, *, progress: Progress = lambda size: None, other_nodes_seconds: float = 0.0
) -> Uploaded:
    """Brings a complete checkpoint into the store, under its step. What is there already is not sent again.

    The files are held open from the start: the run may delete the checkpoint meanwhile.
    progress: is told the bytes of each piece that is sent. other_nodes_seconds: how long to wait for files that are not
    on this disk, which other nodes send.
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
        elsewhere = {name: record for name, record in manifest.files.items() if name not in files}
        if elsewhere and not other_nodes_seconds:
            raise CheckpointError(f"{folder} is incomplete: {next(iter(elsewhere))} is missing")
        if not bucket.holds(prefix + manifests.NAME, len(text), digest):
            bucket.delete(prefix + manifests.NAME)  # of another save of this step, whose files are about to change
            if elsewhere:
                bucket.put(prefix + REQUEST, own, len(text), digest, counter.add)
            send(bucket, prefix, files, manifest.files, counter.add)
            _wait_for(bucket, prefix, elsewhere, other_nodes_seconds)
            bucket.put(prefix + manifests.NAME, own, len(text), digest, counter.add)
        for name in bucket.sizes(prefix):  # the request, and what an earlier save of this step had more
            if name.removeprefix(prefix) not in {manifests.NAME, *manifest.files}:
                bucket.delete(name)
        bucket.abandon(prefix)
    return Uploaded(f"{bucket.url}/{prefix[:-1]}", manifest.nbytes, counter.total, time.monotonic() - began)


def answer(bucket: Bucket, root: Path, progress: Progress = lambda size: None) -> list[str]:
    """On a node that has other files than rank 0: sends what the store's requests list and this disk has, once.

    root: the run's folder of checkpoints here. Returns the names that were asked for and are here. Raises as `upload`.
    """
    sent = []
    for request in [name for name in bucket.sizes() if name.endswith(f"/{REQUEST}")]:
        step = request.removesuffix(f"/{REQUEST}")
        with contextlib.ExitStack() as stack, contextlib.suppress(FileNotFoundError):
            records = manifests.parse(f"{bucket.url}/{step}", bucket.read(request)).files
            # Only rank 0 gives the folder its name.
            places = [root / step, root / f"{step}{manifests.PARTIAL}"]
            files = {}
            for name, record in records.items():
                path = next((place / name for place in places if (place / name).is_file()), None)
                if path and path.stat().st_size == record["bytes"]:
                    files[name] = stack.enter_context(path.open("rb"))
            send(bucket, f"{step}/", files, records, progress)
            sent += [f"{step}/{name}" for name in files]
    return sent


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


def _wait_for(bucket: Bucket, prefix: str, records: Mapping[str, FileRecord], seconds: float) -> None:
    deadline = time.monotonic() + seconds
    missing = dict(records)
    while True:
        missing = {
            name: record
            for name, record in missing.items()
            if not bucket.holds(prefix + name, record["bytes"], record["xxh3_128"])
        }
        if not missing:
            return
        if time.monotonic() > deadline:
            raise RemoteError(
                f"{bucket.url}/{prefix} stays hidden: {len(missing)} of its files, {next(iter(missing))} first, are not on "
                f"this node, and no other sent them within {seconds:g} s"
            )
        time.sleep(min(_LOOK_SECONDS, max(deadline - time.monotonic(), 0.05)))


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
