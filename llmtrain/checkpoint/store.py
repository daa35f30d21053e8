"""Save and load: sharded tensors through torch's distributed checkpoint, keyed by parameter name.

A save goes to `step-N.partial`, is flushed, gets its manifest, and only then takes its name. What has the
name is whole. Saves are synchronous.
"""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, Manifest

# Optimizer groups by parameter name rather than by index: they survive another grouping or another rank count.
_BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)


def save(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    step: int,
    tokens: int,
    config: dict[str, Any],
    clock: dict[str, Any],
    data: dict[str, Any],
    keep_last: int | None,
) -> Path:
    """Saves one checkpoint under `root` and deletes those beyond `keep_last`. Called by every rank.

    Returns the folder. Raises CheckpointError, on every rank, when any rank could not write (a full disk, say);
    earlier checkpoints stay as they were.
    """
    final = root / manifests.folder_name(step)
    partial = final.with_suffix(".partial")
    main = dist.get_rank() == 0
    _together(lambda: _make_empty(partial) if main else None, f"cannot create {partial}")
    state = {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer, options=_BY_NAME),
    }
    _together(lambda: dcp.save(state, checkpoint_id=partial), f"could not write {partial}")

    def publish() -> None:
        files = {path.name: path.stat().st_size for path in sorted(partial.iterdir())}
        for name in files:
            _flush(partial / name)
        written = Manifest(
            step=step, tokens=tokens, config=config, clock=clock, data=data, versions=_versions(), files=files
        )
        manifests.write(partial, written)
        if final.exists():  # the same step saved again, for instance after a resume with other settings
            shutil.rmtree(final)
        partial.rename(final)
        manifests.sync_folder(root)
        _prune(root, keep_last)

    _together(lambda: publish() if main else None, f"could not complete {final}")
    return final


def load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Loads parameters, and optimizer state if an optimizer is given, into a model sharded in any way. Called by every rank."""
    state: dict[str, Any] = {"model": get_model_state_dict(model)}
    if optimizer is not None:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer, options=_BY_NAME)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # one process, without a group
        dcp.load(state, checkpoint_id=folder)
    set_model_state_dict(model, state["model"])
    if optimizer is not None:
        set_optimizer_state_dict(model, optimizer, state["optimizer"], options=_BY_NAME)


def _together(action: Callable[[], object], failure: str) -> None:
    """Runs an action on every rank; if it fails on any, raises CheckpointError on all, so that none waits forever."""
    error = None
    try:
        action()
    except (OSError, RuntimeError, dcp.api.CheckpointException) as caught:
        error = f"{type(caught).__name__}: {caught}"
    errors: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(errors, error)
    for rank, message in enumerate(errors):
        if message is not None:
            raise CheckpointError(f"{failure} (rank {rank}: {message})")


def _make_empty(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
    folder.mkdir(parents=True)


def _flush(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def _prune(root: Path, keep_last: int | None) -> None:
    """Deletes the oldest complete checkpoints. Each is renamed first, so that a kill cannot leave half of one."""
    for folder in manifests.folders(root)[: -keep_last if keep_last else 0]:
        doomed = folder.with_suffix(".partial")
        folder.rename(doomed)
        shutil.rmtree(doomed)


def _versions() -> dict[str, str]:
    return {name: version(name) for name in ("torch", "mosaicml", "mosaicml-streaming")}
