"""A checkpoint that holds a part of a model, and the one beneath it, which its manifest names. No torch here."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import Base, CheckpointError, Manifest
from llmtrain.checkpoint.repository import Repository, silent
from llmtrain.config.addresses import is_remote


@dataclass(frozen=True)
class Layer:
    """A checkpoint of a stack, on this machine."""

    folder: Path
    manifest: Manifest
    index: Index


@dataclass(frozen=True)
class Beneath:
    """The checkpoint beneath those of a run, and the parameters that it has and they leave out: frozen ones."""

    base: Base
    names: frozenset[str]


def base_of(checkpoint: Checkpoint) -> Base:
    """The record of a checkpoint in the manifests of those that lie on it."""
    address = checkpoint.address if is_remote(checkpoint.address) else str(Path(checkpoint.address).resolve())
    return {"address": address, "save_id": checkpoint.require().save_id}


def open_stack(folder: Path, manifest: Manifest) -> list[Layer]:
    """A checkpoint, then the one beneath it, and so on; those in a store are copied to this machine. Hashes of tensors are not
    compared. Raises CheckpointError for one that is missing, damaged or another save."""
    stack = [Layer(folder, manifest, indexes.read(folder, manifest))]
    while (below := checkpoint_beneath(str(folder), manifest)) is not None:
        folder, manifest = below.fetch(), below.require()
        stack.append(Layer(folder, manifest, indexes.read(folder, manifest)))
    return stack


def checkpoint_beneath(address: str, manifest: Manifest) -> Checkpoint | None:
    """The checkpoint beneath one; None for a whole one. Raises CheckpointError where it is not the one that was saved.

    It is looked for where it was, and beside the run of `address`, as when a folder of runs was moved.
    """
    base = manifest.base
    if base is None:
        return None
    found = []
    for place in _places(address, base):
        try:
            checkpoint = Repository(place).find(silent)
            if checkpoint.require().save_id == base["save_id"]:
                return checkpoint
            found.append(f"{place} is another save ({checkpoint.require().save_id})")
        except CheckpointError as error:
            found.append(str(error))
    raise CheckpointError(
        f"{address} holds a part of its model. The rest is in save {base['save_id']} of {base['address']}, which is not there: "
        f"{'; '.join(dict.fromkeys(found))}. Put that checkpoint back (a link to it will do); where both are, "
        f"`llmtrain checkpoint convert {address} OUT --to llmtrain` makes one that needs no other"
    )


def _places(address: str, base: Base) -> Iterator[str]:
    yield base["address"]
    if not is_remote(address) and not is_remote(base["address"]):
        run, place = Path(address).absolute().parent.parent, Path(base["address"])
        tail = place.parts[-3:] if place.parent.name == "checkpoints" else place.parts[-1:]
        yield str(run.parent.joinpath(*tail))
