"""A checkpoint from a store onto a disk: aside, hashed on the way, and under its name only when all of it is right."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, FileRecord
from llmtrain.checkpoint.remote.bucket import RemoteError
from llmtrain.checkpoint.remote.catalogue import Stored

DOWNLOADING = ".downloading"
"""Of the folder's name; a later attempt takes over the files that are whole."""
_THREADS = 8
_DAMAGED = ".damaged"

Progress = Callable[[int], None]


def download(checkpoint: Stored, root: Path, progress: Progress = lambda size: None) -> Path:
    """Brings a checkpoint to `root`/step-N, which appears whole and verified. Returns that folder.

    What was there under this name, damaged, is moved aside. A file whose hash is wrong is fetched a second time; then it is
    wrong in the store. progress: is told the bytes of each piece; a file that an earlier attempt brought counts at once.
    Raises RemoteError when the store fails or this disk does, CheckpointError that names a file that is damaged there.
    """
    manifest = checkpoint.require()
    final = root / manifests.folder_name(manifest.step)
    aside = root / (final.name + DOWNLOADING)
    try:
        aside.mkdir(parents=True, exist_ok=True)
        _require_space(aside, manifest.nbytes)
        _fetch_all(checkpoint, manifest.files, aside, progress)
        for path in aside.iterdir():
            if path.name not in manifest.files:
                path.unlink()
        text = checkpoint.bucket.read(checkpoint.prefix + manifests.NAME)
        if manifests.parse(checkpoint.url, text).save_id != manifest.save_id:
            raise CheckpointError(f"{checkpoint.url} was replaced during its download")
        _write(aside / manifests.NAME, text)
        manifests.sync_folder(aside)
        if final.exists():
            damaged = final.with_suffix(_DAMAGED)
            shutil.rmtree(damaged, ignore_errors=True)
            final.rename(damaged)
        aside.rename(final)
        manifests.sync_folder(root)
    except FileNotFoundError as error:
        raise CheckpointError(f"{checkpoint.url} was deleted during its download ({error})") from None
    except OSError as error:
        raise RemoteError(f"{checkpoint.url} cannot be written to {root}: {error}") from error
    return final


def verify(checkpoint: Stored, progress: Progress = lambda size: None) -> None:
    """Reads every byte of a checkpoint in its store. Raises CheckpointError that names the first file that is damaged,
    RemoteError when the store fails."""
    manifest = checkpoint.require()

    def check(name: str) -> None:
        try:
            found = _receive(checkpoint, name, manifest.files[name], tell, lambda chunk: None)
        except FileNotFoundError:
            raise CheckpointError(f"{checkpoint.url} is incomplete: {name} is missing") from None
        if found != manifest.files[name]["xxh3_128"]:
            raise _damaged(checkpoint, name)

    tell = _one_at_a_time(progress)
    _in_parallel(check, list(manifest.files))


def _fetch_all(checkpoint: Stored, files: dict[str, FileRecord], folder: Path, progress: Progress) -> None:
    tell = _one_at_a_time(progress)

    def fetch(name: str) -> None:
        record, path = files[name], folder / name
        there = path.is_file() and path.stat().st_size == record["bytes"]
        if there and manifests.hash_file(path) == record["xxh3_128"]:
            tell(record["bytes"])
            return
        for _ in range(2):
            with path.open("wb") as file:
                found = _receive(checkpoint, name, record, tell, file.write)
                file.flush()
                os.fsync(file.fileno())
            if found == record["xxh3_128"]:
                return
        path.unlink()
        raise _damaged(checkpoint, name)

    _in_parallel(fetch, list(files))


def _receive(
    checkpoint: Stored, name: str, record: FileRecord, tell: Progress, write: Callable[[bytes], object]
) -> str:
    """Streams a file; its xxh3_128."""
    hasher = xxhash.xxh3_128()
    for chunk in checkpoint.bucket.stream(checkpoint.prefix + name, record["bytes"]):
        write(chunk)
        hasher.update(chunk)
        tell(len(chunk))
    return hasher.hexdigest()


def _damaged(checkpoint: Stored, name: str) -> CheckpointError:
    return CheckpointError(f"{checkpoint.url} is damaged: {name} is not what was written (its xxh3_128 differs)")


def _in_parallel(action: Callable[[str], None], names: list[str]) -> None:
    failed = threading.Event()

    def act(name: str) -> None:
        if not failed.is_set():
            action(name)

    with ThreadPoolExecutor(_THREADS, "download") as pool:
        futures = [pool.submit(act, name) for name in names]
        try:
            for future in futures:
                future.result()
        finally:
            failed.set()


def _one_at_a_time(progress: Progress) -> Progress:
    lock = threading.Lock()

    def tell(size: int) -> None:
        with lock:
            progress(size)

    return tell


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _require_space(folder: Path, nbytes: int) -> None:
    have = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if free < nbytes - have:
        raise RemoteError(f"{folder} needs {nbytes - have:,} bytes more, but {free:,} are free; make room")
