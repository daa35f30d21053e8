"""Locks between processes, and folders of the user alone in the temporary folder."""

import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SILENT_SECONDS = 2.0

log = logging.getLogger("llmtrain")


def private_folder(name: str) -> Path | None:
    """A folder of this user alone, where nobody else can put or lock a file; None where there can be none."""
    folder = Path(tempfile.gettempdir()) / f"llmtrain-{name}-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    mine = found.st_uid == os.getuid() and not found.st_mode & 0o077 and not folder.is_symlink()
    return folder if mine and os.access(folder, os.W_OK) else None


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
