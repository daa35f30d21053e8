"""The lock of a run's folder: one run at a time trains in it. No torch here.

RUN/lock.json names the launch that holds the folder. Whether that still runs is decided by the first of these that can:
an flock on the file, which the launcher and its ranks share and which the kernel drops with the last of them; the process
id with its start time, on the same start of the same machine; or not at all, on another machine, whose lock the user is asked
about. The holder renews the file's time, so that the answer can say when it was last alive.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import socket
import sys
import threading
import time
import uuid
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Literal

from filelock import Timeout

from llmtrain.config.held_folder import moved_text
from llmtrain.config.locks import locked, required_folder
from llmtrain.config.regular_file import parse_json
from llmtrain.distributed.processes import boot_id, pid_namespace, start_time
from llmtrain.errors import RunError, UserError
from llmtrain.logs import log

NAME = "lock.json"
_RENEWAL_SECONDS = 5.0
_SILENT_SECONDS = 30.0
"""A holder that has not renewed its lock for so long has probably died."""
_PATIENCE_SECONDS = 20.0
"""Time for what a killed run left to end, and for another start to write down that it holds the folder."""

Flock = Literal["ours", "another's", "unsupported"]


class RunHeldError(UserError):
    """Another run holds the folder."""


@dataclass(frozen=True)
class Holder:
    """The launch that holds a folder. started: see processes.start_time. flock: whether it could take one. job, attempt: those
    of a job manager that starts a job again only once its processes have ended; an empty job without one."""

    launch: str
    host: str
    boot: str
    namespace: str
    pid: int
    started: int
    since: str
    flock: bool
    job: str
    attempt: list[int]

    @classmethod
    def of_this_process(cls, launch: str, flock: bool) -> Holder:
        job, attempt = _job()
        return cls(
            launch=launch,
            host=socket.gethostname(),
            boot=boot_id(),
            namespace=pid_namespace(),
            pid=os.getpid(),
            started=start_time(os.getpid()) or 0,
            since=time.strftime("%Y-%m-%d %H:%M:%S"),
            flock=flock,
            job=job,
            attempt=attempt,
        )

    @classmethod
    def parse(cls, content: bytes) -> Holder | None:
        """None for content that is no holder: cut short, empty, or something else."""
        try:
            values = parse_json(content)
            holder = cls(**{field.name: values[field.name] for field in fields(cls)})
        except (ValueError, KeyError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and isinstance(holder.attempt, list) else None

    @property
    def runs(self) -> bool:
        """True if the process runs; known only on its own machine, since the same start of that."""
        started = start_time(self.pid)
        return started is not None and started == self.started


class RunLock:
    """A held folder. Context manager: released at its end."""

    def __init__(self, folder: str | Path):
        """Hold a folder, which need not exist. Raises RunHeldError if another run holds it, RunError if it cannot be written."""
        self.folder = Path(folder).absolute()
        self.path = self.folder / NAME
        self._made_folder = not self.folder.exists()
        self.descriptor, self.holder = _acquire(self.path, uuid.uuid4().hex)
        """The descriptor is inherited by the ranks of a launcher: the folder is held until the last of them has ended."""
        self._released = threading.Event()
        _held.append(self)
        threading.Thread(target=self._renew, name="run lock", daemon=True).start()

    def move_aside(self, aside: Path) -> None:
        """Rename the folder to `aside`, and hold a new one in its place. Raises RunHeldError if another start was faster."""
        self.folder.rename(aside)
        self.path = aside / NAME
        descriptor, self.holder = _acquire(self.folder / NAME, self.holder.launch)
        self.path.unlink()
        os.close(self.descriptor)
        self.path, self.descriptor, self._made_folder = self.folder / NAME, descriptor, True

    def release(self) -> None:
        """Give the folder free. A process that was forked from the holder releases nothing."""
        if self._released.is_set() or self.holder.pid != os.getpid():
            return
        self._released.set()
        _held.remove(self)
        with contextlib.suppress(OSError):
            if _is_at(self.path, self.descriptor):
                self.path.unlink()
        os.close(self.descriptor)
        if self._made_folder:
            with contextlib.suppress(OSError):
                self.path.parent.rmdir()  # if nothing was written: the request was refused

    def __enter__(self) -> RunLock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _renew(self) -> None:
        warned = False
        while not self._released.wait(_RENEWAL_SECONDS):
            with contextlib.suppress(OSError):
                current = Holder.parse(self.path.read_bytes())
                if current and current.launch != self.holder.launch and not self._released.is_set():
                    _end_for(current, self.folder)
                os.utime(self.path)
            if not warned and not self.folder.is_dir() and not self._released.is_set():
                warned = True
                log.warning(f"WARNING: {moved_text(self.folder, self.descriptor)}")


_held: list[RunLock] = []


def release_all() -> None:
    """Release what this process holds, before it ends by os._exit."""
    for lock in _held[:]:
        lock.release()


def _end_for(other: Holder, folder: Path) -> None:
    """End this process: two runs in one folder would destroy each other's checkpoints."""
    print(f"{folder} was taken over by {_name(other)}; this run ends without saving", file=sys.stderr, flush=True)
    os._exit(RunError.status)


def _acquire(path: Path, launch: str) -> tuple[int, Holder]:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    # Where there is no flock, starts on this machine that find the same stale lock must take it over one by one.
    mutex = required_folder("run-locks", "locks")
    try:
        while True:
            path.parent.mkdir(parents=True, exist_ok=True)
            with locked(mutex / "lock", "looks at locks of runs", _PATIENCE_SECONDS):
                taken = _try(path, launch, deadline)
            if taken is not None:
                return taken
            time.sleep(0.1)
    except Timeout:
        raise RunError(
            f"another process has locked {mutex / 'lock'} for {_PATIENCE_SECONDS:g} s; end that process"
        ) from None
    except OSError as error:
        raise RunError(f"{path} cannot be written: {error}") from error


def _try(path: Path, launch: str, deadline: float) -> tuple[int, Holder] | None:
    """(open file, holder) if the lock is taken; None if it may be free in a moment, until the deadline. Raises RunHeldError."""
    created = False
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_CREAT | os.O_EXCL, 0o666)
        except FileExistsError:
            if path.is_symlink():
                raise OSError(errno.ENOENT, f"it is a link to {os.readlink(path)}, which does not exist") from None
            return None
        created = True
    taken = False
    try:
        flock = _flock(descriptor)
        if not _is_at(path, descriptor):  # released since it was opened
            return None
        mine = Holder.of_this_process(launch, flock == "ours")
        if not (created and flock != "another's"):
            silent = max(time.time() - os.fstat(descriptor).st_mtime, 0.0)
            holder = Holder.parse(os.pread(descriptor, 1 << 16, 0))
            reason = _reason_to_wait(holder, mine, flock, silent)
            if reason is not None:
                if time.monotonic() < deadline and not reason.final:
                    return None
                raise RunHeldError(_refusal(path, holder, reason.text, silent))
        content = json.dumps(asdict(mine), indent=1).encode() + b"\n"
        os.pwrite(descriptor, content, 0)
        os.ftruncate(descriptor, len(content))
        os.utime(path)
        os.fsync(descriptor)
        taken = True
        return descriptor, mine
    finally:
        if not taken:
            os.close(descriptor)


@dataclass(frozen=True)
class _Reason:
    """A reason why a lock cannot be taken now. final: waiting would not help."""

    text: str
    final: bool


def _reason_to_wait(holder: Holder | None, mine: Holder, flock: Flock, silent: float) -> _Reason | None:
    """None if the holder has ended, and its lock may be taken over. silent: seconds since it was last renewed."""
    if holder is None:
        if flock != "another's" and silent > 2 * _RENEWAL_SECONDS:  # of a start that was killed while it wrote
            return None
        return _Reason("its content cannot be read", final=False)
    same_machine = holder.boot == mine.boot and holder.host == mine.host
    if same_machine and flock != "unsupported" and holder.flock:
        if flock == "ours":
            return None
        if holder.namespace == mine.namespace and not holder.runs:
            return _Reason("that has ended, but processes that it started still run", final=False)
        return _Reason("", final=True)
    if same_machine and holder.namespace == mine.namespace:
        return _Reason("", final=True) if holder.runs else None
    if flock != "another's":
        if holder.host == mine.host and holder.boot != mine.boot and silent > _SILENT_SECONDS:
            return None  # the machine was started again
        if mine.job and holder.job == mine.job and holder.attempt < mine.attempt:
            return None
    # A machine that has just been started again will soon have been silent for long enough.
    return _Reason(f"whether it still runs cannot be seen from {mine.host}", final=holder.host != mine.host)


def _refusal(path: Path, holder: Holder | None, reason: str, silent: float) -> str:
    renewed = f"{silent:.0f} s" if silent < 120 else f"{silent / 60:.0f} min"
    if holder is None:
        return (
            f"{path.parent} may be held by another run: {path} cannot be read. If no run trains there, delete that file"
        )
    text = f"{path.parent} is held by {_name(holder)}"
    if not reason:
        return f"{text}. Wait for its end, or end it; or choose another name or run_dir"
    probably = ": it has probably died" if silent > _SILENT_SECONDS else ""
    return (
        f"{text}; {reason}. It last renewed its lock {renewed} ago{probably}. "
        f"Once it has ended, take over: delete {path} and start again"
    )


def _name(holder: Holder) -> str:
    job = f", {holder.job.replace(':', ' job ')}" if holder.job.startswith("SLURM") else ""
    return f"process {holder.pid} on {holder.host}{job}, since {holder.since} (launch {holder.launch[:8]})"


def _job() -> tuple[str, list[int]]:
    """(job, attempt) of SLURM (and, within its job, scripts/slurm) or torchrun, which start again only what has ended."""
    environment = os.environ
    if job := environment.get("SLURM_JOB_ID"):
        return f"SLURM:{job}", [int(environment.get(name, 0)) for name in ("SLURM_RESTART_COUNT", "LLMTRAIN_RESTART")]
    if (job := environment.get("TORCHELASTIC_RUN_ID", "none")) != "none":
        return f"torchrun:{job}", [int(environment.get("TORCHELASTIC_RESTART_COUNT", 0))]
    return "", []


def _flock(descriptor: int) -> Flock:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return "ours"
    except OSError as error:
        return "another's" if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else "unsupported"


def _is_at(path: Path, descriptor: int) -> bool:
    try:
        return os.path.samestat(os.stat(path), os.fstat(descriptor))
    except FileNotFoundError:
        return False
