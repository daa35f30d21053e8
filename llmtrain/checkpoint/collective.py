"""Work on a checkpoint by all ranks at once: one outcome, and one checkpoint to resume from, for all of them."""

from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from llmtrain.checkpoint import local
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, FormatError, Manifest
from llmtrain.checkpoint.local import LocalCheckpoint
from llmtrain.checkpoint.repository import usable


def on_every_rank(
    action: Callable[[], object],
    failure: str | None = None,
    group: dist.ProcessGroup | None = None,
    kind: type[CheckpointError] = CheckpointError,
) -> None:
    """Run an action on every rank; if it fails on any, raise `kind` (or its FormatError) on all, so that none waits forever.

    failure: the beginning of the message, before the rank and the cause; None if the cause alone is clear.
    """
    error, raised = None, kind
    rank = dist.get_rank(group) if dist.is_initialized() else 0
    try:
        action()
    except CheckpointException as caught:
        rank, error = first_failure(caught)
    except (OSError, RuntimeError) as caught:
        error = f"{type(caught).__name__}: {caught}"
    except CheckpointError as caught:
        error, raised = str(caught), type(caught) if isinstance(caught, FormatError) else kind
    answers: list[tuple[int, str | None, type[CheckpointError]]] = [(rank, error, raised)]
    if dist.is_initialized():
        answers *= dist.get_world_size(group)
        dist.all_gather_object(answers, (rank, error, raised), group=group)
    for rank, message, raised in answers:
        if message is not None:
            raise raised(message if failure is None else f"{failure} (rank {rank}: {message})")


def verify_in_shares(folder: Path, manifest: Manifest, names: list[str] | None = None) -> None:
    """Compare the hashes of a checkpoint's files (or of all ranks' `names`), each rank those of a share. Raises CheckpointError on
    all."""
    if names is not None and dist.is_initialized():
        everyone: list[list[str]] = [[] for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, names)
        names = sorted({name for some in everyone for name in some})
    by_size = sorted(manifest.files if names is None else names, key=lambda name: -manifest.files[name]["bytes"])
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    share = by_size[rank::size]
    on_every_rank(lambda: manifests.verify(folder, manifest, names=share))


def newest_checkpoint(
    root: Path, *, verify: bool, warn: Callable[[str], None], verified: str | None = None
) -> LocalCheckpoint | None:
    """The newest good checkpoint under `root`, the same on every rank; None if there is none at all. Called by every rank.

    Cleans up after a kill first. Every newer one that is damaged is named through `warn` (on every rank) and passed over.
    verify: compare the hashes too. verified: save_id of one whose hashes need not be compared again.
    Raises CheckpointError if there are checkpoints, but none is good, and for one of another format.
    """
    if dist.get_rank() == 0:
        local.recover(root)
    names = [[folder.name for folder in reversed(local.folders(root))]]
    dist.broadcast_object_list(names, group_src=0)  # which also makes the others wait for `recover`

    def check(checkpoint: LocalCheckpoint) -> None:
        on_every_rank(checkpoint.read_index)  # and so the manifest
        manifest = checkpoint.require()
        if verify and manifest.save_id != verified:
            verify_in_shares(checkpoint.folder, manifest)

    candidates = [LocalCheckpoint(root / name) for name in names[0]]
    for checkpoint in usable(candidates, lambda text: warn(f"WARNING: {text}"), check):
        return checkpoint
    if candidates:
        raise CheckpointError(
            f"{root}: no checkpoint of this run can be used (see above); put an intact copy back, or start anew with --fresh"
        )
    return None


def first_failure(error: CheckpointException) -> tuple[int, str]:
    """(rank, cause): torch reports failures by rank, with tracebacks."""
    rank, (cause, _) = next(iter(error.failures.items()))
    return rank, str(cause) if isinstance(cause, CheckpointError) else f"{type(cause).__name__}: {cause}"
