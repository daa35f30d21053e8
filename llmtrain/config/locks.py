"""Locks between processes, and folders of the user alone in the temporary folder."""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from llmtrain.errors import RunError

_SILENT_SECONDS = 2.0

log = logging.getLogger("llmtrain")


def private_folder(name: str) -> Path | None:
    """A folder of this user alone, where nobody else can put or lock a file; None where there can be none."""
    folder = Path(tempfile.gettempdir()) / f"llmtrain-{name}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        mine = found.st_uid == os.getuid() and not found.st_mode & 0o022 and stat.S_ISDIR(found.st_mode)
        if mine:
            folder.chmod(0o700)  # where an earlier version let others read
    except OSError:
        return None
    return folder if mine and os.access(folder, os.W_OK) else None


def required_folder(name: str, what: str) -> Path:
    """`private_folder`. what: is kept there, for the message. Raises RunError where there can be none."""
    folder = private_folder(name)
    if folder is None:
        place = Path(tempfile.gettempdir()) / f"llmtrain-{name}-{os.getuid()}"
        raise RunError(f"{place} cannot hold {what} of this user alone; remove it, or set TMPDIR to another folder")
    return folder


@contextmanager
def locked(path: Path, what: str, patience: float = -1) -> Iterator[None]:
    """Context that holds a lock on a file. Where another process holds it for seconds, that is logged.

    what: what the other process does, for the message. patience: seconds, after which filelock.Timeout is raised; -1: none.
    Raises OSError where the file cannot be made.
    """
    from filelock import FileLock, Timeout  # here, because `llmtrain check` imports this file and locks nothing

    path.touch()  # FileLock waits for ever where no file can be made
    lock = FileLock(path)
    first = _SILENT_SECONDS if patience < 0 else min(patience, _SILENT_SECONDS)
    try:
        lock.acquire(timeout=first)
    except Timeout:
        log.info(f"another process {what}: waiting for it to end ({path} is locked)")
        lock.acquire(timeout=patience if patience < 0 else patience - first)
    try:
        yield
    finally:
        lock.release()
