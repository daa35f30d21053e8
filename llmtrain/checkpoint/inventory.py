"""The checkpoints of a run, in its folder or in a store, seen alike: what `llmtrain checkpoint` lists, verifies and removes.
No torch here."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import rotation
from llmtrain.checkpoint.manifest import CheckpointError, Manifest, NewerFormatError, OldFormatError
from llmtrain.checkpoint.remote import catalogue
from llmtrain.checkpoint.remote import download as downloads
from llmtrain.checkpoint.remote.bucket import open_bucket
from llmtrain.checkpoint.remote.catalogue import Stored
from llmtrain.config.addresses import is_remote


@dataclass(frozen=True)
class Item:
    """A checkpoint, or what there is of one.

    place: a folder here, or an object prefix in a store. manifest: None when `problem` says why it cannot be used.
    written: when, in seconds since the epoch; None where the store does not say.
    """

    name: str
    place: Path | Stored
    step: int
    nbytes: int
    written: float | None
    manifest: Manifest | None
    problem: CheckpointError | None
    partial: bool = False

    @property
    def health(self) -> str:
        """In words; by structure and sizes, since no content was read."""
        if self.partial:
            return "partial (being written or deleted, or cut short)"
        if isinstance(self.problem, NewerFormatError):
            return "newer format: update llmtrain"
        if isinstance(self.problem, OldFormatError):
            return "format 1: `llmtrain checkpoint convert` reads it"
        return "complete" if self.problem is None else f"damaged: {_short(self.problem, self)}"

    @property
    def address(self) -> str:
        return self.place.url if isinstance(self.place, Stored) else str(self.place)

    def verify(self, progress: Callable[[int], None]) -> None:
        """Reads every byte. Raises CheckpointError that names the file that is wrong."""
        if self.problem is not None:
            raise self.problem
        assert self.manifest is not None
        if isinstance(self.place, Stored):
            downloads.verify(self.place, progress)
        else:
            manifests.verify(self.place, self.manifest, progress)

    def delete(self) -> None:
        """What remains when it is cut short is no checkpoint. Raises CheckpointError."""
        if isinstance(self.place, Stored):
            catalogue.delete(self.place)
        else:
            try:
                rotation.delete(self.place)
            except OSError as error:
                raise CheckpointError(f"cannot delete {self.place}: {error}") from error


def items(address: str) -> list[Item]:
    """Every checkpoint of the run at an address, oldest first, whole or not; or the one checkpoint that it names.

    Raises CheckpointError when there is nothing of the kind.
    """
    if is_remote(address):
        found = [_stored(checkpoint) for checkpoint in catalogue.stored(open_bucket(address))]
        if not found:
            raise CheckpointError(f"{address} holds no checkpoint")
        return found
    path = Path(address).expanduser()
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such folder; expected a run's folder or a checkpoint")
    if (path / manifests.NAME).is_file():
        return [_local(path)]
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    whole = [_local(folder) for folder in manifests.folders(root)]
    unfinished = [
        Item(folder.name, folder, manifests.step_of(folder), size_of(folder), folder.stat().st_mtime, None, None, True)
        for suffix in (manifests.PARTIAL, manifests.DELETED, downloads.DOWNLOADING)
        for folder in root.glob(f"step-{'[0-9]' * 8}{suffix}")
    ]
    if not whole and not unfinished:
        raise CheckpointError(f"{path} holds no checkpoint (neither {manifests.NAME} nor checkpoints/step-*)")
    return sorted(whole + unfinished, key=lambda item: (item.step, item.name))


def one(address: str) -> Item:
    """The checkpoint at an address, or the newest of the run there that can be used. Raises CheckpointError."""
    found = items(address)
    usable = [item for item in found if item.manifest is not None]
    if not usable:
        raise found[-1].problem or CheckpointError(f"{found[-1].address}: {found[-1].health}")
    return usable[-1]


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def age(item: Item) -> str:
    """`3 h`; empty where it is not known."""
    if item.written is None:
        return ""
    seconds = max(time.time() - item.written, 0)
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def _local(folder: Path) -> Item:
    manifest, problem = None, None
    try:
        manifest = manifests.read(folder)
    except CheckpointError as error:
        problem = error
    number = folder.name.removeprefix("step-")[:8]
    step = manifest.step if manifest else int(number) if number.isdigit() else 0
    partial = problem is not None and not (folder / manifests.NAME).exists()
    written = (folder if partial else folder / manifests.NAME).stat().st_mtime
    return Item(folder.name, folder, step, size_of(folder), written, manifest, problem, partial)


def _stored(found: Stored) -> Item:
    name = found.prefix.rstrip("/").rpartition("/")[2] or found.url.rpartition("/")[2]
    return Item(name, found, found.step, found.nbytes, None, found.manifest, found.problem, found.partial)


def _short(problem: CheckpointError, item: Item) -> str:
    """Without the address, which the table has said."""
    text = str(problem).removeprefix(item.address)
    for beginning in (" is damaged: ", " is incomplete: ", ": ", " ", "/"):
        text = text.removeprefix(beginning)
    return text
