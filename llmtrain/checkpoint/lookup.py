"""From what a user names, a run or one checkpoint, here or in a store, to a checkpoint that is whole. No torch here."""

from __future__ import annotations

from pathlib import Path

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, Manifest
from llmtrain.config.addresses import is_remote
from llmtrain.logs import log


def manifest_of(path: Path | str) -> Manifest:
    """Of what `find` would find; nothing is copied. Raises CheckpointError."""
    if is_remote(str(path)):
        from llmtrain.checkpoint.remote import fetch

        return fetch.manifest_of(str(path))
    return find(path)[1]


def find(path: Path | str) -> tuple[Path, Manifest]:
    """The checkpoint at `path`, or the newest complete one of the run at `path`. Of `s3://bucket/prefix` a copy is made here.

    Newer checkpoints that are not whole are named on standard error and passed over.
    Raises CheckpointError that says what is there instead.
    """
    if is_remote(str(path)):
        from llmtrain.checkpoint.remote.fetch import local_copy

        folder = local_copy(str(path))
        return folder, manifests.read(folder)
    path = Path(path).expanduser()
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; expected a run's folder or a checkpoint in one")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; expected a run's folder or a checkpoint's")
    if (path / manifests.NAME).is_file():
        return path, manifests.read(path)
    # A run's folder, or its checkpoints/ itself.
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = manifests.latest(root, warn=log.warning)
    if found is not None:
        return found
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a model in Hugging Face format, no checkpoint of llmtrain; `llmtrain import {path} OUT` makes one"
        )
    if manifests.folders(root):
        raise CheckpointError(f"{path}: none of its checkpoints is complete")
    raise CheckpointError(f"{path} holds no checkpoint (neither {manifests.NAME} nor checkpoints/step-*)")
