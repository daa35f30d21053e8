"""Processes of this machine: whether one runs, the memory of this one, and children that end with the process that began them."""

import ctypes
import os
import resource
import signal
import sys
import threading
import time
from pathlib import Path

LAUNCHER = "LLMTRAIN_LAUNCHER"
"""Environment variable: the process id of our launcher, in its ranks."""
SAME_SIGNAL_SECONDS = 2.0
"""A job manager may signal the launcher and the ranks at once, and the launcher passes it on: that is one SIGTERM."""
_PR_SET_PDEATHSIG = 1


def boot_id() -> str:
    """An id of this start of the machine's kernel; empty where there is none."""
    return _read("/proc/sys/kernel/random/boot_id").strip()


def pid_namespace() -> str:
    """The namespace (of a container, say) in which process ids of this process have a meaning; empty where there is none."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def start_time(pid: int) -> int | None:
    """Time at which a process began, in ticks since the machine's start; 0 where this is not known, None if it has ended.

    It distinguishes a process from a later one with the same id. A zombie has ended.
    """
    if Path("/proc/self/stat").exists():
        fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()  # a name may hold spaces and parentheses
        return int(fields[19]) if fields and fields[0] not in "ZX" else None
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return 0


def age(pid: int) -> float:
    """Seconds since a process began; 0 where this is not known."""
    ticks, uptime = start_time(pid), _read("/proc/uptime").split()
    return max(float(uptime[0]) - ticks / os.sysconf("SC_CLK_TCK"), 0.0) if ticks and uptime else 0.0


def own_memory() -> int:
    """Bytes of memory that this process alone holds; where there is no /proc (macOS), the most that it has held."""
    if fields := _read("/proc/self/statm").split():
        return (int(fields[1]) - int(fields[2])) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def end_with_parent(parent: int | None = None) -> None:
    """Have this process killed when the one that started it ends, however that ends. parent: its id, if that is known, for
    one that has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch_parent, args=(os.getppid(),), daemon=True).start()
    if parent is not None and os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


_TELLING = (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""A terminal that closed; what SLURM's --signal and submitit send before the time limit."""


def saving_signals() -> list[signal.Signals]:
    """Signals by which a run saves and ends: SIGTERM, SIGINT, and of _TELLING those that are not ignored (SIGHUP under `nohup`)."""
    heard = [number for number in _TELLING if signal.getsignal(number) != signal.SIG_IGN]
    return [signal.SIGTERM, signal.SIGINT, *heard]


def exit_on_sigterm() -> None:
    """Have the first SIGTERM raise SystemExit in this process, which then ends what it started as its contexts end; others are
    ignored meanwhile: `timeout` signals a process, and then its group."""

    def leave(*_: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        sys.exit(128 + signal.SIGTERM)

    signal.signal(signal.SIGTERM, leave)


def serve_parent(parent: int) -> None:
    """`end_with_parent`, and take SIGTERM from the parent alone: `timeout`, SLURM and systemd signal every process of a job at
    once, and the parent, which then saves, still needs this one; so does a terminal with Ctrl-C, or that closes. Call it before
    there are threads. parent: as above."""
    end_with_parent(parent)
    for number in (signal.SIGINT, *_TELLING):
        signal.signal(number, signal.SIG_IGN)
    if sys.platform == "linux":
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_await_parents_sigterm, name="SIGTERM", daemon=True).start()


def _await_parents_sigterm() -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(0)  # as PyTorch's own handler in a loader's process does


def end_with_launcher() -> None:
    """`end_with_parent` for a rank of our launcher, torchrun or Composer's. A rank that a shell started may outlive it."""
    if LAUNCHER in os.environ:
        end_with_parent(int(os.environ[LAUNCHER]))
    elif "TORCHELASTIC_RUN_ID" in os.environ or "composer" in _read(f"/proc/{os.getppid()}/cmdline"):
        end_with_parent()


def _watch_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:  # also ProcessLookupError: it ended between open and read
        return ""
