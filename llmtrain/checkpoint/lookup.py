"""From what a user names, a run's folder or one checkpoint, to a checkpoint that is whole. No torch here."""

from __future__ import annotations

import sys
from pathlib import Path

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, Manifest


def find(path: Path) -> tuple[Path, Manifest]:
    """The checkpoint at `path`, or the newest complete one of the run at `path`.

    Newer checkpoints that are not whole are named on standard error and passed over.
    Raises CheckpointError that says what is there instead.
    """
    path = path.expanduser()
    if not path.exists():
        raise CheckpointError(f"{path}: no such folder; expected a run's folder or a checkpoint in one")
    if not path.is_dir():
        raise CheckpointError(f"{path} is a file; expected a run's folder or a checkpoint's")
    if (path / manifests.NAME).is_file():
        return path, manifests.read(path)
    # A run's folder, or its checkpoints/ itself.
    root = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = manifests.latest(root, warn=lambda text: print(text, file=sys.stderr, flush=True))
    if found is not None:
        return found
    if (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a model in Hugging Face format, no checkpoint of llmtrain; `llmtrain import {path} OUT` makes one"
        )
    if manifests.folders(root):
        raise CheckpointError(f"{path}: none of its checkpoints is complete")
    raise CheckpointError(f"{path} holds no checkpoint (neither {manifests.NAME} nor checkpoints/step-*)")
