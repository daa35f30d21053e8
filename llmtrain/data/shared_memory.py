"""StreamingDataset's shared memory, kept from colliding between jobs and from outliving a crash.

Streaming names its segments 000000_locals, 000001_locals, ... by the first number that is free on the machine. Two
jobs that start together can take the same number, and segments of a killed job stay behind: the next dataset may then
adopt an old position or wait at an old barrier for ever. `streaming.base.util.clean_stale_shared_memory` removes
every segment, those of other live jobs too; here only those that no live process has mapped are removed.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from torch import distributed as dist

_FOLDER = Path("/dev/shm")
_NAME = re.compile(rf"\d{{6}}_(?:{'|'.join([*SHM_TO_CLEAN, BARRIER_FILELOCK, CACHE_FILELOCK])})")
_MIN_AGE = 1.0
"""Seconds. A segment is created first and mapped a moment later."""


@contextmanager
def dataset_lock() -> Iterator[None]:
    """Construct a dataset inside: one job on this machine at a time, after what crashed jobs left is gone.

    Every rank must enter. The process group must exist if there are several ranks.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    assert not several or dist.is_initialized(), "create the process group before any dataset"
    leads = int(os.environ.get("LOCAL_RANK", 0)) == 0
    lock = FileLock(Path(tempfile.gettempdir()) / f"llmtrain-streaming-{os.getuid()}.lock")
    if leads:
        lock.acquire()
    try:
        if leads:
            remove_stale_segments()
        if several:
            dist.barrier()
        yield
    finally:
        if leads:
            lock.release()


def remove_stale_segments() -> list[str]:
    """Unlink this user's streaming segments that no process has mapped, and their lock files. Returns the names.

    Linux only: elsewhere nothing is removed. A number counts as free for streaming once both are gone.
    """
    if not _FOLDER.is_dir() or not Path("/proc/self/maps").exists():
        return []
    candidates = [
        path for folder in (_FOLDER, Path(tempfile.gettempdir())) for path in folder.iterdir() if _is_old(path)
    ]
    live = {name.partition("_")[0] for name in _mapped_names()} if candidates else set()
    stale = [path for path in candidates if path.name.partition("_")[0] not in live]
    for path in stale:
        path.unlink(missing_ok=True)
    return sorted(path.name for path in stale)


def _is_old(path: Path) -> bool:
    if not _NAME.fullmatch(path.name):
        return False
    try:
        stat = path.stat()
    except FileNotFoundError:
        return False
    return stat.st_uid == os.getuid() and time.time() - stat.st_ctime > _MIN_AGE


def _mapped_names() -> set[str]:
    """Names of the segments that some process we may look at has mapped."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except (OSError, ProcessLookupError):
            continue  # it has ended, or is another user's and so cannot have opened our segments
        names.update(re.findall(r"/dev/shm/(\S+)", text))
    return names
