"""A launcher: one process per rank on this machine; when one dies, all end."""

import contextlib
import os
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path
from typing import IO

from llmtrain.distributed.early_ranks import EarlyRanks, core_share
from llmtrain.distributed.processes import LAUNCHER, SAME_SIGNAL_SECONDS, saving_signals
from llmtrain.distributed.run_lock import RunLock
from llmtrain.distributed.world import ENDED, LISTENER, rank_environment
from llmtrain.errors import first_few, signal_name
from llmtrain.logs import log

_EXIT_SECONDS = 10.0
"""Time for the ranks to end once they have saved, or one has died."""
_ALONE_SECONDS = 30.0
"""Time for which ranks may go on without one that ended with status 0, and was not done."""
_LINES = 20
"""Lines of a failed rank's log that are shown."""


def launch(
    command: list[str],
    processes: int,
    run_dir: str,
    grace_seconds: float = 0.0,
    lock: RunLock | None = None,
    attempt: int = 0,
    early: EarlyRanks | None = None,
) -> int:
    """Run `command` as `processes` ranks. Returns 0 if all succeed, else the first failing rank's status.

    Rank 0 keeps the terminal; the others write to RUN/logs/rankN.txt. A rank that dies without a message (killed, out of
    memory) is reported here, with the end of its log; the remaining ranks are then stopped, as they are when one ends with status 0
    before it is done (world.exit_status_of_rank). SIGTERM and SIGINT are passed on,
    and the ranks have `grace_seconds` to save; a second one, more than two seconds later, ends them at once. lock: of the run's
    folder, which the ranks then hold as well. attempt: number of this start of the same run, from 0. early: those of them that
    run `command` already.

    The ranks meet at a socket of 127.0.0.1 that rank 0 inherits while it listens: no other process can take its port.
    """
    logs = Path(run_dir) / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    shared = {
        **os.environ,
        **core_share(processes),
        LAUNCHER: str(os.getpid()),
        "LLMTRAIN_LAUNCH_ID": lock.holder.launch if lock else uuid.uuid4().hex,
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
    }
    if "lo" in (name for _, name in socket.if_nameindex()):
        shared.setdefault("GLOO_SOCKET_IFNAME", "lo")  # gloo would listen on the address of the machine's name
    held = (lock.descriptor,) if lock else ()
    ranks: list[subprocess.Popen] = []
    earlier = [0] * processes  # bytes in each rank's log from attempts before
    hear = _signalled_once()
    before = {number: signal.signal(number, hear) for number in saving_signals()}
    ended, done = os.pipe()
    os.set_blocking(ended, False)
    shared[ENDED] = str(done)
    try:
        with socket.create_server(("127.0.0.1", 0), backlog=2 * processes) as listener:
            port, handle = listener.getsockname()[1], listener.fileno()
            for rank in range(processes):
                environment = {**shared, **rank_environment(rank, processes, port), LISTENER: str(handle)}
                log_file = logs / f"rank{rank}.txt" if rank else None
                mode = "a" if attempt else "w"  # what an earlier attempt ended with is worth reading
                with log_file.open(mode) if log_file else contextlib.nullcontext() as output:
                    earlier[rank] = os.fstat(output.fileno()).st_size if output else 0
                    start = early.admit if early and early.waiting else partial(_start, command)
                    ranks.append(start(environment, output, (*held, done) if rank else (*held, done, handle)))
        return _watch(ranks, logs, grace_seconds, earlier, ended)
    except _Signalled as signalled:  # a job manager ends the parent: the ranks must not outlive it
        return _preempt(ranks, logs, grace_seconds, earlier, signalled.args[0])
    finally:
        os.close(ended)
        os.close(done)
        for number, handler in before.items():
            signal.signal(number, handler)


class _Signalled(BaseException):
    """A signal by which a run saves, as an exception."""


def _signalled_once() -> Callable[[int, object], None]:
    """A handler that raises _Signalled, but not for the first signal's echo: `timeout` signals a process, and then its group."""
    heard: list[float] = []

    def hear(number: int, _: object) -> None:
        heard.append(time.monotonic())
        if len(heard) == 1 or heard[-1] - heard[0] > SAME_SIGNAL_SECONDS:
            raise _Signalled(signal.Signals(number))

    return hear


def _start(
    command: list[str], environment: dict[str, str], log: IO | None, descriptors: tuple[int, ...]
) -> subprocess.Popen:
    return subprocess.Popen(command, env=environment, stdout=log, stderr=log, pass_fds=descriptors)


def _preempt(
    ranks: list[subprocess.Popen], logs: Path, grace_seconds: float, earlier: list[int], number: signal.Signals
) -> int:
    """Pass a signal on and wait for the ranks, which save. One that has finished the run meanwhile is no failure; for one that died
    the others would wait in vain."""
    seconds, when = grace_seconds + _EXIT_SECONDS, ""
    try:
        killed = _stop(ranks, number, seconds)
    except _Signalled as second:
        when = f"had not ended before a second {signal_name(second.args[0])}"
        killed = [rank for rank, process in enumerate(ranks) if process.poll() is None]
        _kill(ranks)
    if failed := {rank: ranks[rank].returncode for rank in _died(ranks) if rank not in killed}:
        _report(failed, logs, earlier)
        when = when or f"had not ended {_EXIT_SECONDS:g} s after that"
    if killed:  # which may not have been able to say a word
        when = when or f"had not ended {seconds:g} s after {signal_name(number)}"
        named = f"rank{'s' * (len(killed) > 1)} {first_few(killed, 8)}"
        log.error(f"{named} {when}: killed; what was trained since the newest checkpoint is lost")
    return 0 if all(rank.returncode == 0 for rank in ranks) else 128 + number


def _died(ranks: list[subprocess.Popen]) -> list[int]:
    """Ranks that have ended in another way than well, or by a signal by which a run saves."""
    well = {0, *(128 + number for number in saving_signals()), *(-number for number in saving_signals())}
    return [rank for rank, process in enumerate(ranks) if process.poll() is not None and process.returncode not in well]


def _watch(ranks: list[subprocess.Popen], logs: Path, grace_seconds: float, earlier: list[int], ended: int) -> int:
    """ended: pipe from which come the numbers of ranks that are done."""
    gone: dict[int, float] = {}  # ranks with status 0 that were not done, by the time
    finished: set[int] = set()
    while True:
        statuses = [rank.poll() for rank in ranks]
        for number in saving_signals():
            if 128 + number in statuses:  # somebody signalled the ranks, and not us
                return _preempt(ranks, logs, grace_seconds, earlier, number)
        if any(statuses):
            time.sleep(0.5)  # for the rank that reports the error to finish
            failed = {rank: status for rank, process in enumerate(ranks) if (status := process.poll())}
            _kill(ranks)  # they wait for the rank that is gone; SIGTERM would ask them to save
            _report_gone(gone)
            return _report(failed, logs, earlier)
        if all(status == 0 for status in statuses):
            return 0
        if 0 in statuses:
            with contextlib.suppress(BlockingIOError):
                finished |= set(map(int, os.read(ended, 1 << 16).split()))
            now = time.monotonic()
            for rank, status in enumerate(statuses):
                if status == 0 and rank not in finished:
                    gone.setdefault(rank, now)
            if gone and now - min(gone.values()) > _ALONE_SECONDS:
                _kill(ranks)
                _report_gone(gone)
                return 1
        time.sleep(0.1)


def _report_gone(ranks: Collection[int]) -> None:
    """Name ranks that ended with status 0 before they were done."""
    if ranks:
        named = f"rank{'s' * (len(ranks) > 1)} {first_few(sorted(ranks), 8)}"
        log.error(
            f"{named} ended with status 0 before the end of the run, without a reason; the other ranks were stopped"
        )


def _report(failed: dict[int, int], logs: Path, earlier: list[int]) -> int:
    """Print the end of the failed ranks' logs, and return the status of the first. failed: exit status by rank. earlier: bytes of
    each log that are not of this attempt.

    Of ranks that failed together one reports the error, perhaps in its log. A rank that was killed cannot, and is the cause
    if there is one."""
    killed = {rank: status for rank, status in failed.items() if status < 0}
    for rank, status in killed.items():
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        hint = " (the system may have run out of memory)" if name == "SIGKILL" else ""
        log.error(f"rank {rank} was killed by {name}{hint}; the other ranks were stopped")
    for rank in killed or failed:
        output = ""
        if rank:
            with contextlib.suppress(OSError):  # the run's folder is gone, say, which may be the cause
                output = (logs / f"rank{rank}.txt").read_bytes()[earlier[rank] :].decode(errors="replace").strip()
        if output:
            log.error("\n".join(_ending(output.splitlines())))
        elif rank and rank not in killed:
            log.error(
                f"rank {rank} ended with status {failed[rank]}, and {logs}/rank{rank}.txt has no reason: is its disk full?"
            )
    status = next(iter((killed or failed).values()))
    return 128 - status if status < 0 else status


def _ending(lines: list[str]) -> list[str]:
    """The end of a log; of one that ends with Python's report of a fault in C code, where that was, and not what it lies in."""
    faults = [number for number, line in enumerate(lines) if line.startswith("Fatal Python error: ")]
    for number in range(faults[-1], len(lines)) if faults else ():
        if lines[number].startswith("Current thread "):
            return [lines[faults[-1]], *lines[number : number + _LINES - 1]]
    return lines[-_LINES:]


def _stop(ranks: list[subprocess.Popen], sign: signal.Signals, seconds: float) -> list[int]:
    """Send a signal, and kill the ranks that still run so many seconds later, or _EXIT_SECONDS after another died. Returns them."""
    for rank in ranks:
        if rank.poll() is None:
            rank.send_signal(sign)
    deadline = time.monotonic() + seconds
    while (
        left := [rank for rank, process in enumerate(ranks) if process.poll() is None]
    ) and time.monotonic() < deadline:
        if _died(ranks):
            deadline = min(deadline, time.monotonic() + _EXIT_SECONDS)
        time.sleep(0.05)
    _kill([ranks[rank] for rank in left])
    return left


def _kill(ranks: list[subprocess.Popen]) -> None:
    for rank in ranks:
        rank.kill()
    for rank in ranks:
        try:
            rank.wait(_EXIT_SECONDS)
        except subprocess.TimeoutExpired:
            log.error(f"process {rank.pid} was killed and does not end: a device or a file system does not answer it")
            rank.wait()
