"""Copy of a checkpoint from a store to a disk: hashed on the way, and under its name only when it is whole. No torch here."""

import itertools
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import xxhash

from llmtrain.checkpoint.base import Progress
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, FileRecord, Manifest
from llmtrain.checkpoint.format.threads import in_threads, one_at_a_time
from llmtrain.checkpoint.local import DOWNLOADING, folder_name, is_own
from llmtrain.checkpoint.stores.base import ObjectStore, StoreError
from llmtrain.config.output_folder import sync_path, write_synced

_THREADS = 8
_DAMAGED = ".damaged"


def download(store: ObjectStore, prefix: str, manifest: Manifest, root: Path, progress: Progress) -> Path:
    """Copy the checkpoint whose objects' names begin with `prefix` to `root`/step-N, which appears whole and verified.

    A damaged folder of this name is renamed to step-N.damaged (or -2, …). A file whose hash is wrong is downloaded a second
    time; if it is wrong again, it is wrong in the store. progress: a file that an earlier attempt downloaded counts at once.
    Returns the folder. Raises StoreError if the store or this disk fails, CheckpointError with the file
    that is damaged there.
    """
    url = _url(store, prefix)
    final = root / folder_name(manifest.step)
    aside = root / (final.name + DOWNLOADING)
    try:
        if os.path.lexists(aside) and not is_own(aside):
            aside.rename(_free_name(aside.with_suffix(".file")))
        aside.mkdir(parents=True, exist_ok=True)
        _require_space(aside, manifest.nbytes)
        _fetch_all(store, prefix, manifest.files, aside, progress)
        for path in aside.iterdir():
            if path.name not in manifest.files:
                path.unlink()
        text = store.read(prefix + manifests.NAME)
        if manifests.parse(url, text).save_id != manifest.save_id:
            raise CheckpointError(f"{url} was replaced during its download")
        write_synced(aside / manifests.NAME, text)
        sync_path(aside)
        if final.exists():
            final.rename(_free_name(final.with_suffix(_DAMAGED)))
        aside.rename(final)
        sync_path(root)
    except FileNotFoundError as error:
        raise CheckpointError(f"{url} was deleted during its download ({error})") from None
    except OSError as error:
        raise StoreError(f"{url} cannot be written to {root}: {error}") from error
    return final


def verify(store: ObjectStore, prefix: str, manifest: Manifest, progress: Progress) -> None:
    """Read every byte of a checkpoint in its store. Raises CheckpointError with the first file that is damaged, StoreError
    if the store fails."""

    def check(name: str) -> None:
        try:
            found = _receive(store, prefix, name, manifest.files[name], advance, lambda chunk: None)
        except FileNotFoundError:
            raise CheckpointError(f"{_url(store, prefix)} is incomplete: {name} is missing") from None
        if found != manifest.files[name]["xxh3_128"]:
            raise _damaged(store, prefix, name)

    advance = one_at_a_time(progress)
    in_threads(check, manifest.files, _THREADS)


def _fetch_all(store: ObjectStore, prefix: str, files: dict[str, FileRecord], folder: Path, progress: Progress) -> None:
    advance = one_at_a_time(progress)

    def fetch(name: str) -> None:
        record, path = files[name], folder / name
        there = path.is_file() and path.stat().st_size == record["bytes"]
        if there and manifests.hash_file(path) == record["xxh3_128"]:
            advance(record["bytes"])
            return
        for _ in range(2):
            with path.open("wb") as file:
                found = _receive(store, prefix, name, record, advance, file.write)
                file.flush()
                os.fsync(file.fileno())
            if found == record["xxh3_128"]:
                return
        path.unlink()
        raise _damaged(store, prefix, name)

    in_threads(fetch, files, _THREADS)


def _receive(
    store: ObjectStore, prefix: str, name: str, record: FileRecord, advance: Progress, write: Callable[[bytes], object]
) -> str:
    """Stream a file; its xxh3_128 in hex."""
    hasher = xxhash.xxh3_128()
    for chunk in store.stream(prefix + name, record["bytes"]):
        write(chunk)
        hasher.update(chunk)
        advance(len(chunk))
    return hasher.hexdigest()


def _free_name(path: Path) -> Path:
    names = (path.with_name(f"{path.name}-{number}") for number in itertools.count(2))
    return next(name for name in itertools.chain([path], names) if not os.path.lexists(name))


def _url(store: ObjectStore, prefix: str) -> str:
    return f"{store.url}/{prefix}".rstrip("/")


def _damaged(store: ObjectStore, prefix: str, name: str) -> CheckpointError:
    return CheckpointError(f"{_url(store, prefix)} is damaged: {name} is not what was written (its xxh3_128 differs)")


def _require_space(folder: Path, nbytes: int) -> None:
    have = sum(path.stat().st_size for path in folder.iterdir())
    free = shutil.disk_usage(folder).free
    if free < nbytes - have:
        raise StoreError(f"{folder} needs {nbytes - have:,} bytes more, but {free:,} are free; make room")
