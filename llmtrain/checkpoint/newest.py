"""The checkpoint a run continues from: the newest that is whole and, byte by byte, what was written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from llmtrain.checkpoint import index as indexes
from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint import rotation
from llmtrain.checkpoint.manifest import CheckpointError, FormatError, Manifest
from llmtrain.checkpoint.store import together, verify_together


@dataclass(frozen=True)
class Newest:
    """seconds: that verifying took."""

    folder: Path
    manifest: Manifest
    seconds: float


def newest(root: Path, *, verify: bool, warn: Callable[[str], None], verified: str | None = None) -> Newest | None:
    """The newest good checkpoint under `root`, the same on every rank; None where there is none at all. Called by every rank.

    Tidies up after a kill first. Every newer one that is damaged is told through `warn` (on every rank) and passed over.
    verified: save_id of one whose hashes need not be compared again.
    Raises CheckpointError when there are checkpoints, but none is good, and for one of another format.
    """
    if dist.get_rank() == 0:
        rotation.recover(root)
    names = [[folder.name for folder in reversed(manifests.folders(root))]]
    dist.broadcast_object_list(names, group_src=0)  # which also lets the others wait
    for name in names[0]:
        folder = root / name
        began = time.perf_counter()
        try:
            manifest = _read_together(folder)
            if verify and manifest.save_id != verified:
                verify_together(folder, manifest)
            return Newest(folder, manifest, time.perf_counter() - began)
        except FormatError:
            raise
        except CheckpointError as error:
            warn(f"WARNING: {error}; trying the checkpoint before it")
    if names[0]:
        raise CheckpointError(
            f"{root}: no checkpoint of this run can be used (see above); put an intact copy back, or start anew with --fresh"
        )
    return None


def _read_together(folder: Path) -> Manifest:
    """Raises on all ranks if one cannot read it."""
    found: list[Manifest] = []
    refused: list[FormatError] = []

    def read() -> None:
        try:
            manifest = manifests.read(folder)
            indexes.read(folder, manifest)
            found.append(manifest)
        except FormatError as error:
            refused.append(error)
            raise

    try:
        together(read, None)
    except CheckpointError:
        if refused:
            raise refused[0] from None
        raise
    return found[0]
