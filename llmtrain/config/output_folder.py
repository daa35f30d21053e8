"""Folders that a command writes: what can be checked before the work, and a folder that appears complete or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from llmtrain.errors import UserError
from llmtrain.progress import format_bytes


class OutputError(UserError):
    """A place that cannot be written to; the message names the reason and what to do."""


def unwritable_reason(folder: str | Path) -> str | None:
    """The reason why nothing can be written into `folder`, which need not exist yet; None if it can be written to."""
    path = Path(folder).expanduser().absolute()
    existing = next(path for path in (path, *path.parents) if os.path.lexists(path))
    if existing.is_symlink() and not existing.exists():
        return f"{existing} is a link to {os.readlink(existing)}, which does not exist; choose another"
    if not existing.is_dir():
        return f"{existing} is a file, not a folder; choose another"
    if not os.access(existing, os.W_OK | os.X_OK):
        return f"{existing} may not be written to; choose another"
    try:
        tempfile.TemporaryFile(dir=existing).close()  # root may write anywhere, but not into /proc
    except OSError as error:
        return f"{existing} cannot be written to: {error.strerror}; choose another"
    return None


def refuse_existing(out: Path) -> None:
    """Check that `out` is absent, or an empty folder. Raises OutputError otherwise."""
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise OutputError(f"{out} exists already; name another folder, or remove it first")


def require_space(out: Path, nbytes: int) -> None:
    """Check that the file system of `out` has `nbytes` free. Raises OutputError otherwise."""
    existing = next(parent for parent in out.absolute().parents if parent.exists())
    free = shutil.disk_usage(existing).free
    stale = partial_folder(out)
    if stale.is_dir():  # it will make room
        free += sum(file.stat().st_size for file in stale.rglob("*") if file.is_file())
    if free < nbytes:
        raise OutputError(
            f"{out} needs {format_bytes(nbytes)}, but {existing} has {format_bytes(free)} free; make room or write elsewhere"
        )


@contextlib.contextmanager
def atomic_folder(out: Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield the new folder `out`.partial, which is renamed to `out` once the block ends without an exception, and else deleted.

    Files reach the disk before the rename, so that a power cut leaves no complete folder of empty files. What a killed
    process left behind is deleted first. replace: whether `out` may exist. Raises OutputError if it exists and may not,
    before the block or after it, and for any error of the file system.
    """
    partial, old = partial_folder(out), _old(out)
    if not replace:
        refuse_existing(out)
    try:
        for stale in (partial, old) if replace else (partial,):
            if stale.exists():
                shutil.rmtree(stale)
        partial.mkdir(parents=True)
        yield partial
        publish_folder(partial, out, replace=replace)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def publish_folder(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename `partial` to `out` once all of its files have reached the disk. replace: whether `out` may exist."""
    old = _old(out)
    for path in (*partial.rglob("*"), partial):
        _flush(path)
    if not replace:
        refuse_existing(out)
    elif out.exists():
        shutil.rmtree(old, ignore_errors=True)
        out.rename(old)
    partial.rename(out)
    _flush(out.absolute().parent)
    if replace:
        shutil.rmtree(old, ignore_errors=True)


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file that appears whole, and whose content is on the disk; several processes may write the same."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Write a file and wait until its content is on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def partial_folder(out: Path) -> Path:
    """The folder in which `out` is made."""
    return out.with_name(f"{out.name}.partial")


def _old(out: Path) -> Path:
    return out.with_name(f"{out.name}.old")


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
