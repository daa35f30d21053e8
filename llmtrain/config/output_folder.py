"""Folders that a command writes: what can be checked before the work, and a folder that appears complete or not at all.

Whatever is made beside an output bears a mark (MARKER) with its own name in it. What has no such mark is somebody else's: it
is neither used nor removed, and another name is taken.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path

from llmtrain.config.regular_file import open_regular
from llmtrain.errors import UserError
from llmtrain.logs import log
from llmtrain.progress import format_bytes

MARKER = ".llmtrain-unfinished"
"""File in a folder that is being made or removed."""
PARTIAL, OLD = ".partial", ".old"


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
    for stale in filter(is_marked, _names(out, PARTIAL)):  # it will make room
        free += sum(file.stat().st_size for file in stale.rglob("*") if file.is_file())
    if free < nbytes:
        raise OutputError(
            f"{out} needs {format_bytes(nbytes)}, but {existing} has {format_bytes(free)} free; make room or write elsewhere"
        )


@contextlib.contextmanager
def atomic_folder(out: Path) -> Iterator[Path]:
    """Yield a new folder beside `out`, which is renamed to `out` once the block ends without an exception, and else deleted.

    Files reach the disk before the rename, so that a power cut leaves no complete folder of empty files. What a killed
    process left behind is deleted first. Raises OutputError if `out` exists, before the block or after it, and for any
    error of the file system.
    """
    refuse_existing(out)
    try:
        with contextlib.ExitStack() as stack:
            partial = _own_folder(out, stack)
            stack.callback(lambda: shutil.rmtree(partial, ignore_errors=True) if is_marked(partial) else None)
            yield partial
            publish_folder(partial, out, replace=False)
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error}") from error


def publish_folder(partial: Path, out: Path, *, replace: bool) -> None:
    """Rename a marked folder to `out` once all of its files have reached the disk. replace: whether `out` may exist."""
    for path in (*partial.rglob("*"), partial):
        sync_path(path)
    old = None
    if not replace:
        refuse_existing(out)
    else:
        for stale in filter(is_marked, _names(out, OLD)):  # of a process that was killed here
            shutil.rmtree(stale)
        if out.exists():
            old = _free(list(_names(out, OLD)))
            _mark(out, old.name)
            out.rename(old)
    try:
        partial.rename(out)
    except OSError:
        if old is not None:
            old.rename(out)
            (out / MARKER).unlink()
        raise
    (out / MARKER).unlink(missing_ok=True)
    sync_path(out.absolute().parent)
    if old is not None:
        shutil.rmtree(old, ignore_errors=True)


def working_folder(out: Path) -> Path:
    """The folder in which `out` is made by one process after the other, each of which goes on where the last one ended:
    the first that is marked, else a name that is free. See `make_marked`."""
    names = list(_names(out, PARTIAL))
    for path in names:
        if is_marked(path):
            return path
    return _free(names)


def make_marked(folder: Path) -> None:
    """Make a folder that bears the mark; one that is there and bears it is used. Raises FileExistsError for any other."""
    if is_marked(folder):
        return
    if os.path.lexists(folder):
        raise FileExistsError(f"{folder} is there already, and not of llmtrain; move it away")
    # Under another name until the mark is in it, for other machines that make the same.
    fresh = folder.with_name(f".{uuid.uuid4().hex}")
    fresh.mkdir(parents=True)
    try:
        _mark(fresh, folder.name)
        fresh.rename(folder)
    except OSError:
        shutil.rmtree(fresh)
        if not is_marked(folder):
            raise


def is_marked(folder: Path) -> bool:
    """True for a folder that llmtrain makes or removes, under the name it has."""
    try:
        if folder.is_symlink() or (folder / MARKER).is_symlink():
            return False
        with open_regular(folder / MARKER) as file:
            return file.read(1024).decode(errors="replace") == _marking(folder.name)
    except OSError:
        return False


def _mark(folder: Path, name: str) -> None:
    write_synced(folder / MARKER, _marking(name).encode(errors="surrogateescape"))


def _marking(name: str) -> str:
    return f"llmtrain makes or removes {name}; what is in this folder is deleted once that has ended\n"


def _own_folder(out: Path, stack: contextlib.ExitStack) -> Path:
    """An empty marked folder that no other process uses, until the stack ends."""
    names = list(_names(out, PARTIAL))
    for path in names:
        if os.path.lexists(path) and not is_marked(path):
            continue
        with contextlib.suppress(FileExistsError):
            make_marked(path)
            handle = stack.enter_context(open_regular(path / MARKER))
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another process makes the same
                continue
            except OSError:  # a file system without locks
                pass
            for entry in path.iterdir():
                if entry.name != MARKER:
                    shutil.rmtree(entry) if entry.is_dir() and not entry.is_symlink() else entry.unlink()
            if path != names[0]:
                log.info(f"{names[0]} is in use, or not of llmtrain, and stays as it is; {out} is made in {path}")
            return path
    return _free(names)


_NAMES = 100


def _names(out: Path, suffix: str) -> Iterator[Path]:
    """X.partial, X.partial-2, ..."""
    for number in range(1, _NAMES + 1):
        yield out.with_name(f"{out.name}{suffix}" + (f"-{number}" if number > 1 else ""))


def _free(names: list[Path]) -> Path:
    for path in names:
        if not os.path.lexists(path):
            return path
    raise OutputError(f"{names[0]} to {names[-1].name} are all there already; move them away")


def replace_file(path: Path, content: bytes | memoryview) -> None:
    """Write a file that appears whole, and whose content is on the disk; several processes may write the same."""
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}")
    try:
        write_synced(temporary, content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def named(path: Path) -> Iterator[None]:
    """Context in which an OSError of a write names the file, as Python's names the file only where it is opened."""
    try:
        yield
    except OSError as error:
        if error.filename is None and error.errno is not None:
            error.filename = str(path)
        raise


def write_synced(path: Path, content: bytes | memoryview) -> None:
    """Write a file and wait until its content is on the disk."""
    with named(path), path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def sync_path(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
