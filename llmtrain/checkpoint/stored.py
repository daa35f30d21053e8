"""Checkpoints in an object store: their listing, and a copy of one on this machine. No torch here."""

import hashlib
import os
import re
import sys
import tempfile
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint, Progress, no_progress
from llmtrain.checkpoint.download import download, verify
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.local import LocalCheckpoint, folder_name
from llmtrain.checkpoint.stores.base import ObjectStore, StoreError
from llmtrain.config.addresses import local_problem
from llmtrain.config.locks import locked
from llmtrain.logs import log
from llmtrain.progress import ByteBar

LOCK = ".remote.lock"
"""Name of the file that processes lock while one of them downloads into a folder."""
_STEP = re.compile(r"(checkpoints/)?step-\d{8}")


class StoredCheckpoint(Checkpoint):
    """See Checkpoint. Without a manifest it is being uploaded (see upload.upload) or that was interrupted, or it was deleted.

    prefix: with which its objects' names begin, such as `step-00000100/`; empty if the store's address is the checkpoint's.
    sizes: bytes of its objects, by file name.
    Raises StoreError if the store does not answer.
    """

    def __init__(self, store: ObjectStore, prefix: str, sizes: dict[str, int]):
        self.store, self.prefix, self.sizes = store, prefix, sizes
        self.address = f"{store.url}/{prefix}".rstrip("/")
        self.name = self.address.rpartition("/")[2]
        _ = self.manifest  # read now, where the caller expects a StoreError

    def _read(self) -> Manifest | CheckpointError:
        if self.partial:  # also where a pipe has the manifest's name
            why = (
                "being uploaded, or that was cut short"
                if self.in_progress
                else "deleted in part, or sent by an earlier llmtrain"
            )
            return CheckpointError(f"{self.address} is not a complete checkpoint: it has no {manifests.NAME} ({why})")
        try:
            manifest = manifests.parse(self.address, self.store.read(self.prefix + manifests.NAME))
            for name, record in manifest.files.items():
                if name not in self.sizes:
                    return CheckpointError(f"{self.address} is incomplete: {name} is missing")
                if (size := self.sizes[name]) != record["bytes"]:
                    return CheckpointError(f"{self.address} is damaged: {name} has {size} bytes, not {record['bytes']}")
        except FileNotFoundError:
            return CheckpointError(f"{self.address} is not a complete checkpoint: it has no {manifests.NAME}")
        except StoreError:
            raise
        except CheckpointError as error:
            return error
        return manifest

    @property
    def step(self) -> int:
        if self.prefix:
            return int(self.prefix[-9:-1])
        return self.manifest.step if self.manifest else 0

    @property
    def nbytes(self) -> int:
        return sum(self.sizes.values())

    @property
    def written(self) -> None:
        return None

    @property
    def partial(self) -> bool:
        return manifests.NAME not in self.sizes

    @property
    def in_progress(self) -> bool:
        return self.partial and manifests.UNFINISHED in self.sizes

    @property
    def own(self) -> bool:
        return manifests.NAME in self.sizes or all(map(manifests.OWN_FILE.fullmatch, self.sizes))

    def read_index(self) -> Index:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / indexes.NAME).write_bytes(self.store.read(self.prefix + indexes.NAME))
            return indexes.read(Path(folder), self.require())

    def verify(self, progress: Progress = no_progress) -> None:
        verify(self.store, self.prefix, self.require(), progress)

    def download(self, root: Path, progress: Progress = no_progress) -> Path:
        """Copy it to a folder under `root`; see download.download."""
        return download(self.store, self.prefix, self.require(), root, progress)

    def fetch(self) -> Path:
        """A copy in LLMTRAIN_CACHE (default ~/.cache/llmtrain), made once; any number of processes may call this."""
        manifest = self.require()
        place = os.environ.get("LLMTRAIN_CACHE", "~/.cache/llmtrain")
        if problem := local_problem(place):
            raise CheckpointError(f"LLMTRAIN_CACHE: {problem}, found {place!r}")
        cache = Path(place).expanduser() / "checkpoints"
        # The save, too, is in the name: another one of the same step is another folder.
        root = cache / hashlib.sha256(f"{self.address} {manifest.save_id}".encode()).hexdigest()[:16]
        root.mkdir(parents=True, exist_ok=True)
        with locked(root / LOCK, f"fetches {self.address}"):
            folder = root / folder_name(manifest.step)
            if LocalCheckpoint(folder).problem is not None:
                log.info(f"downloading {self.address} ({self.nbytes / 1e6:,.1f} MB) to {folder}")
                with ByteBar(sys.stderr.isatty(), self.nbytes, title="download") as bar:
                    self.download(root, bar.advance)
        return folder

    def delete(self) -> None:
        """Delete the manifest first: from then on it is no checkpoint, whatever interrupts the rest; the mark of an upload last.
        Objects of others with names of this prefix stay."""
        files = {manifests.NAME, *(self.manifest.files if self.manifest else ())}
        own = [name for name in self.sizes if name in files or manifests.OWN_FILE.fullmatch(name)]
        for name in sorted(own, key=lambda name: (name != manifests.NAME, name == manifests.UNFINISHED)):
            self.store.delete(self.prefix + name)
        self.store.abandon(self.prefix)


def list_stored(store: ObjectStore) -> list[StoredCheckpoint]:
    """Every checkpoint of a run in a store, oldest first, whole or not; or the one that the address itself is.

    The run's checkpoints are right under the address, or under `checkpoints/`, as in a run's folder.
    Raises StoreError if the store does not answer.
    """
    by_prefix: dict[str, dict[str, int]] = {}
    for name, size in store.sizes().items():
        prefix, slash, file = name.rpartition("/")
        if prefix and not _STEP.fullmatch(prefix):
            continue
        by_prefix.setdefault(prefix + slash, {})[file] = size
    own = by_prefix.pop("", {})
    if manifests.NAME in own:
        return [StoredCheckpoint(store, "", own)]
    found = [StoredCheckpoint(store, prefix, sizes) for prefix, sizes in by_prefix.items()]
    return sorted(found, key=lambda checkpoint: checkpoint.step)
