"""Checkpoints in a local folder: their names, how one replaces another, and what a kill leaves. No torch here.

A checkpoint appears, is replaced and disappears in one rename each, so that what bears a checkpoint's name is whole.
"""

import os
import re
import shutil
import uuid
from pathlib import Path

from llmtrain.checkpoint.base import Checkpoint, Progress, no_progress
from llmtrain.checkpoint.format import index as indexes
from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.index import Index
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.config.held_folder import require_in_place
from llmtrain.config.output_folder import sync_path
from llmtrain.errors import first_few
from llmtrain.logs import log

PARTIAL = ".partial"
"""Suffix of a folder that is being written."""
REPLACED = ".replaced"
"""Suffix of a whole checkpoint whose step is being saved again, until the new one has the name."""
DELETED = ".deleted"
"""Suffix of a folder that is being deleted."""
DOWNLOADING = ".downloading"
"""Suffix of a folder that is being downloaded; a later attempt takes over the files that are whole."""
_FOLDER = re.compile(rf"(step-\d{{8}})(?:{re.escape(REPLACED)})?")
_IN_PROGRESS = re.compile(rf"step-\d{{8}}({'|'.join(map(re.escape, (PARTIAL, DELETED, DOWNLOADING)))})")
_LEFT = re.compile(rf"step-\d{{8}}({'|'.join(map(re.escape, (REPLACED, DELETED, PARTIAL)))})+")


class LocalCheckpoint(Checkpoint):
    """See Checkpoint. Its manifest is read when it is first needed."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.name, self.address = folder.name, str(folder)

    def _read(self) -> Manifest | CheckpointError:
        if self.in_progress:
            return CheckpointError(f"{self.folder} is not a complete checkpoint")
        try:
            return manifests.read(self.folder)
        except CheckpointError as error:
            return error

    @property
    def step(self) -> int:
        if re.match(r"step-\d{8}", self.name):
            return step_of(self.folder)
        return self.manifest.step if self.manifest else 0

    @property
    def nbytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())

    @property
    def written(self) -> float:
        return (self.folder if self.partial else self.folder / manifests.NAME).stat().st_mtime

    @property
    def partial(self) -> bool:
        return self.in_progress or not (self.folder / manifests.NAME).exists()

    @property
    def in_progress(self) -> bool:
        return _IN_PROGRESS.fullmatch(self.name) is not None

    @property
    def own(self) -> bool:
        return is_own(self.folder)

    def read_index(self) -> Index:
        return indexes.read(self.folder, self.require())

    def verify(self, progress: Progress = no_progress) -> None:
        manifests.verify(self.folder, self.require(), progress)

    def fetch(self) -> Path:
        return self.folder

    def delete(self) -> None:
        try:
            delete(self.folder)
        except OSError as error:
            raise CheckpointError(f"cannot delete {self.folder}: {error}") from error


def folder_name(step: int) -> str:
    return f"step-{step:08d}"


def step_of(folder: Path) -> int:
    """The step in a name that begins as `folder_name` makes it."""
    return int(folder.name[5:13])


def root_of(path: Path) -> Path:
    """The folder of a run's checkpoints; `path` is it, or the run's folder."""
    return path / "checkpoints" if (path / "checkpoints").is_dir() else path


def folders(root: Path) -> list[Path]:
    """Checkpoint folders under `root`, oldest first, whole or not; half-written ones have another name.

    A checkpoint that was being replaced when the process was killed still counts, under the name it has then.
    """
    found: dict[str, Path] = {}
    for path in sorted(root.glob("step-*")):  # step-N before step-N.replaced
        if (match := _FOLDER.fullmatch(path.name)) and path.is_dir():
            found.setdefault(match[1], path)
    return [found[name] for name in sorted(found)]


def misplaced(root: Path) -> list[Path]:
    """Entries that are named like a checkpoint's folder, finished or not, and are no such folder."""
    named = (
        path
        for path in sorted(root.glob("step-*"))
        if _FOLDER.fullmatch(path.name) or _IN_PROGRESS.fullmatch(path.name)
    )
    return [path for path in named if not path.is_dir() or (_IN_PROGRESS.fullmatch(path.name) and not is_own(path))]


def list_local(path: Path) -> list[LocalCheckpoint]:
    """Every checkpoint of the run at `path`, oldest first, whole or not; or the one checkpoint that `path` itself is."""
    if (path / manifests.NAME).is_file():
        return [LocalCheckpoint(path)]
    root = root_of(path)
    unfinished = [folder for folder in root.glob("step-*") if _IN_PROGRESS.fullmatch(folder.name)]
    return sorted(map(LocalCheckpoint, [*folders(root), *unfinished]), key=lambda found: (found.step, found.name))


def is_own(folder: Path) -> bool:
    """True for a folder that holds a checkpoint's files and nothing else, or a manifest."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    names = {path.name for path in folder.iterdir()}
    return manifests.NAME in names or all(map(manifests.OWN_FILE.fullmatch, names))


def clear(folder: Path, make: bool = False) -> None:
    """Delete a folder that is no checkpoint (any more), if it exists; what is not ours and has its name, or lies in it, is renamed
    instead. make: make it anew. Raises OSError, also for the folder of a run that was moved (see config.held_folder)."""
    require_in_place(folder)
    if is_own(folder):
        _remove(folder)
    elif os.path.lexists(folder):
        _move_foreign(folder)
    if make:
        folder.mkdir(parents=True)


def replace(partial: Path, final: Path) -> None:
    """Give a whole checkpoint its name. One that has the name already is renamed first and deleted after.

    After a kill in between, the renamed one still counts (see `folders`), and `recover` gives it its name back.
    """
    aside = final.with_name(final.name + REPLACED)
    if os.path.lexists(final) and not is_own(final):  # put there while the run trained: not ours to delete
        _move_foreign(final)
    if final.exists():  # the same step saved again, for instance after a resume with other settings
        clear(aside)
        final.rename(aside)
    partial.rename(final)
    sync_path(final.parent)
    if is_own(aside):
        delete(aside)


def delete(folder: Path) -> None:
    """Delete a checkpoint. It is renamed first: a kill cannot leave half of one under its name."""
    doomed = folder.with_name(folder.name + DELETED)
    clear(doomed)
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        if not is_own(folder):
            raise OSError(f"it holds what is no checkpoint's: {', '.join(sorted(os.listdir(folder))[:5])}")
        folder.rename(doomed)
        clear(doomed)


def recover(root: Path) -> None:
    """Clean up after a kill; called by one process, when none is saving.

    A checkpoint that was being replaced gets its name back; half-written and half-deleted folders are deleted.
    """
    for folder in folders(root):
        if folder.name.endswith(REPLACED) and is_own(folder):
            folder.rename(folder.with_name(folder.name.removesuffix(REPLACED)))
    for folder in root.glob("step-*"):
        if _LEFT.fullmatch(folder.name) and is_own(folder):
            _remove(folder)


def _remove(folder: Path) -> None:
    """Delete a folder that is ours. What others put into it, such as an export, is moved to a folder beside it first."""
    try:
        listed = set(manifests.read(folder).files)
    except CheckpointError:
        listed = set()
    others = [path for path in sorted(folder.iterdir()) if path.name not in listed and not path.name.startswith(".nfs")]
    if foreign := [path for path in others if not manifests.OWN_FILE.fullmatch(path.name)]:
        kept = _foreign_name(folder.with_name(folder_name(step_of(folder))))
        kept.mkdir()
        for path in foreign:
            path.rename(kept / path.name)
        log.warning(
            f"{folder} held what is no checkpoint's ({first_few([path.name for path in foreign])}): now in {kept}"
        )
    shutil.rmtree(folder)


def _foreign_name(path: Path) -> Path:
    return path.with_name(f"{path.name}.file-{uuid.uuid4().hex[:8]}")


def _move_foreign(path: Path) -> None:
    path.rename(_foreign_name(path))
