"""Protection of StreamingDataset's shared memory against collisions between jobs and remains of crashes.

Streaming names its segments 000000_locals, 000001_locals, ... by the first number that is free on the machine. Two
jobs that start together can take the same number, and segments of a killed job stay behind: the next dataset may then
adopt an old position or wait at an old barrier for ever. `streaming.base.util.clean_stale_shared_memory` removes
every segment, those of other live jobs too; here only those that no live process has mapped are removed.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock
from streaming.base.constant import BARRIER_FILELOCK, CACHE_FILELOCK, SHM_TO_CLEAN
from torch import distributed as dist

from llmtrain.errors import RunError
from llmtrain.progress import format_bytes

_FOLDER = Path("/dev/shm")
_NAME = re.compile(rf"\d{{6}}_(?:{'|'.join([*SHM_TO_CLEAN, BARRIER_FILELOCK, CACHE_FILELOCK])})")
_MIN_AGE = 1.0
"""Seconds. A segment is mapped a moment after it is created."""


@contextmanager
def dataset_lock() -> Iterator[None]:
    """Context for constructing a dataset: one job on this machine at a time, after stale segments are removed.

    Every rank must enter. The process group must exist if there are several ranks.
    """
    several = int(os.environ.get("WORLD_SIZE", 1)) > 1
    assert not several or dist.is_initialized(), "create the process group before any dataset"
    is_local_main = int(os.environ.get("LOCAL_RANK", 0)) == 0
    lock = FileLock(Path(tempfile.gettempdir()) / f"llmtrain-streaming-{os.getuid()}.lock")
    if is_local_main:
        lock.acquire()
    try:
        if is_local_main:
            remove_stale_segments()
        if several:
            dist.barrier()
        yield
    finally:
        if is_local_main:
            lock.release()


def require_room(nbytes: int) -> None:
    """Check that shared memory can take a list of samples. Raises RunError otherwise: to write beyond its size ends the process by
    SIGBUS, without a word."""
    if not _FOLDER.is_dir():
        return
    disk = shutil.disk_usage(_FOLDER)
    if disk.total and disk.free < nbytes:
        raise RunError(
            f"the list of the epoch's samples takes {format_bytes(nbytes)} of shared memory, but {_FOLDER} has "
            f"{format_bytes(disk.free)} free; give the container more (docker run --shm-size=...), or take data.order: seekable, "
            "which makes no list"
        )


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
    """Names of the segments that a process with readable /proc/PID/maps has mapped."""
    names: set[str] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            text = maps.read_text(errors="replace")
        except (OSError, ProcessLookupError):
            continue  # ended, or of another user, who cannot open our segments
        names.update(re.findall(r"/dev/shm/(\S+)", text))
    return names
