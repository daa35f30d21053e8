"""Folders that come, are replaced and go, each in one rename; and what a kill in between leaves. No torch here."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from llmtrain.checkpoint import manifest as manifests
from llmtrain.checkpoint.manifest import CheckpointError, FormatError


@dataclass(frozen=True)
class Keep:
    """Which checkpoints stay. last: the newest so many, all when None. every: and the first of every so many steps."""

    last: int | None = None
    every: int | None = None


def clear(folder: Path, make: bool = False) -> None:
    """Deletes a folder that is no checkpoint (any more), if it is there; makes it anew if asked to."""
    if folder.exists():
        shutil.rmtree(folder)
    if make:
        folder.mkdir(parents=True)


def replace(partial: Path, final: Path) -> None:
    """Gives a whole checkpoint its name. One that has it already is renamed aside first and deleted after.

    Killed in between, the one aside still counts (manifests.folders finds it), and `recover` gives it its name back.
    """
    aside = final.with_name(final.name + manifests.REPLACED)
    if final.exists():  # the same step saved again, for instance after a resume with other settings
        clear(aside)
        final.rename(aside)
    partial.rename(final)
    manifests.sync_folder(final.parent)
    delete(aside)


def delete(folder: Path) -> None:
    """Deletes a checkpoint, which is none from the first moment on: a kill cannot leave half of one."""
    doomed = folder.with_name(folder.name + manifests.DELETED)
    clear(doomed)
    if folder.exists():
        folder.rename(doomed)
        clear(doomed)


def prune(root: Path, keep: Keep) -> None:
    """Deletes what need not stay. Only whole checkpoints count as kept: damaged ones never push out a good one.

    Damaged ones that are newer than all that is kept are left to be looked at.
    """
    if keep.last is None:
        return
    healths = {folder: _health(folder) for folder in manifests.folders(root)}
    found = [folder for folder, health in healths.items() if health != "another format"]  # not ours to judge
    whole = [folder for folder, health in healths.items() if health == "whole"]
    if not whole:
        return
    stay = staying(map(manifests.step_of, whole), keep)
    oldest = whole[-keep.last :][0]
    for folder in found[: found.index(oldest)]:
        if manifests.step_of(folder) not in stay:
            delete(folder)


def staying(steps: Iterable[int], keep: Keep) -> set[int]:
    """Of whole checkpoints, by step: those that must stay."""
    ordered = sorted(steps)
    if keep.last is None:
        return set(ordered)
    stay = set(ordered[-keep.last :])
    if keep.every is not None:
        first: dict[int, int] = {}
        for step in ordered:
            first.setdefault(step // keep.every, step)
        stay |= {step for part, step in first.items() if part > 0}
    return stay


def recover(root: Path) -> None:
    """Tidies up after a kill; called by one process, when none is saving.

    A checkpoint that was being replaced gets its name back; what was half written or half deleted goes.
    """
    for folder in manifests.folders(root):
        if folder.name.endswith(manifests.REPLACED):
            folder.rename(folder.with_name(folder.name.removesuffix(manifests.REPLACED)))
    for suffix in (manifests.REPLACED, manifests.DELETED, manifests.PARTIAL):
        for folder in root.glob(f"step-*{suffix}"):
            clear(folder)


def _health(folder: Path) -> Literal["whole", "damaged", "another format"]:
    try:
        manifests.read(folder)
    except FormatError:
        return "another format"
    except CheckpointError:
        return "damaged"
    return "whole"
