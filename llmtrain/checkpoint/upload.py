"""Copy of a checkpoint from a disk to a store: the files first, the manifest last, so that it appears only when it is whole.

Before the files the manifest is sent under another name: what has neither name lost its manifest, and was once whole.
"""

import contextlib
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import xxhash

from llmtrain.checkpoint.base import Progress, no_progress
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord, Manifest
from llmtrain.checkpoint.format.threads import in_threads, one_at_a_time
from llmtrain.checkpoint.local import folder_name
from llmtrain.checkpoint.stores.base import ObjectStore

_THREADS = 8


class GoneError(CheckpointError):
    """The run has deleted the checkpoint before its upload began."""


@dataclass(frozen=True)
class Uploaded:
    """The result of an upload. sent: bytes over the wire, without those that the store had already."""

    url: str
    nbytes: int
    sent: int
    seconds: float


def upload(store: ObjectStore, folder: Path, *, progress: Progress = no_progress) -> Uploaded:
    """Copy a complete checkpoint into the store, under its step. Files that the store has already are not sent again.

    The files are held open from the start: the run may delete the checkpoint meanwhile.
    progress: counts the pieces that are sent.
    Raises GoneError; StoreError when the store fails, CheckpointError when the checkpoint is not whole. The store then
    has what it had before, or, if that was another save of this step, nothing under this name.
    """
    began = time.monotonic()
    total = 0

    def count(size: int) -> None:
        nonlocal total
        total += size
        progress(size)

    sent = one_at_a_time(count)
    with contextlib.ExitStack() as stack:
        text, manifest, files = _open(folder, stack)
        prefix = f"{folder_name(manifest.step)}/"
        own = files.pop(manifests.NAME)
        digest = xxhash.xxh3_128_hexdigest(text)
        if missing := manifest.files.keys() - files.keys():
            raise CheckpointError(f"{folder} is incomplete: {min(missing)} is missing")
        earlier: set[str] = set()
        if not store.holds(prefix + manifests.NAME, len(text), digest):
            earlier = _listed(store, prefix)
            store.put(prefix + manifests.UNFINISHED, own, len(text), digest, no_progress)
            store.delete(prefix + manifests.NAME)  # of another save of this step, whose files are about to change
            send(store, prefix, files, manifest.files, sent)
            store.put(prefix + manifests.NAME, own, len(text), digest, sent)
        for name in store.sizes(prefix):  # files that only an earlier save of this step had
            file = name.removeprefix(prefix)
            own_file = file in earlier or manifests.OWN_FILE.fullmatch(file)
            if own_file and file not in {manifests.NAME, *manifest.files}:
                store.delete(name)
        store.abandon(prefix)
    return Uploaded(f"{store.url}/{prefix[:-1]}", manifest.nbytes, total, time.monotonic() - began)


def _listed(store: ObjectStore, prefix: str) -> set[str]:
    """Files of the checkpoint that the store has of this step; none where it has none, or a damaged one."""
    with contextlib.suppress(FileNotFoundError, CheckpointError):
        return set(manifests.parse(prefix, store.read(prefix + manifests.NAME)).files)
    return set()


def send(
    store: ObjectStore,
    prefix: str,
    files: Mapping[str, BinaryIO],
    records: Mapping[str, FileRecord],
    progress: Progress,
) -> None:
    """Send files, several at a time; those that the store has with this size and hash are skipped."""

    def send_one(name: str) -> None:
        size, digest = records[name]["bytes"], records[name]["xxh3_128"]
        if not store.holds(prefix + name, size, digest):
            store.put(prefix + name, files[name], size, digest, progress)

    in_threads(send_one, files, _THREADS)


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
