"""A folder that appears at once and whole, or not at all. No torch here."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from llmtrain.checkpoint.manifest import sync_folder


class OutputError(ValueError):
    """Nothing can be written there; the message says why and what to do."""


def refuse_existing(out: Path) -> None:
    """Raises OutputError unless `out` is absent, or an empty folder."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists already; name another folder, or remove it first")


def require_space(out: Path, nbytes: int) -> None:
    """Raises OutputError when the file system that `out` will be on has less free."""
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    stale = partial_of(out)
    if stale.is_dir():  # it will make room
        free += sum(file.stat().st_size for file in stale.rglob("*") if file.is_file())
    if free < nbytes:
        raise OutputError(
            f"{out} needs {readable(nbytes)}, but {existing} has {readable(free)} free; make room or write elsewhere"
        )


def partial_of(out: Path) -> Path:
    return out.with_name(out.name + ".partial")


@contextlib.contextmanager
def appearing(out: Path) -> Iterator[Path]:
    """Inside, a folder to write to, `out`.partial; it takes its name when the block ends well, and only then.

    What an earlier attempt left there is deleted. Raises OutputError when something is at `out`, before or after, and
    for what the file system refuses.
    """
    refuse_existing(out)
    partial = partial_of(out)
    try:
        if partial.exists():
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
        yield partial
        for file in sorted(partial.rglob("*")):
            _flush(file)
        sync_folder(partial)
        refuse_existing(out)
        partial.rename(out)
        sync_folder(out.absolute().parent)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}") from error


def _flush(path: Path) -> None:
    if path.is_dir():
        sync_folder(path)
        return
    with path.open("rb") as file:
        os.fsync(file.fileno())


def readable(nbytes: int) -> str:
    """13.3 GB."""
    size = float(nbytes)
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"
