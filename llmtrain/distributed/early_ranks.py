"""Ranks of this machine that a launcher starts before it has read the config: they import PyTorch meanwhile, and wait at a socket
for the rest of their environment. No torch here."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
from typing import IO, Any

from llmtrain.distributed.processes import LAUNCHER, saving_signals
from llmtrain.distributed.world import ENDED, LISTENER

_WAITS = "LLMTRAIN_WAITS"
"""Environment variable of such a rank: the descriptor of its socket."""


def core_share(processes: int) -> dict[str, str]:
    """Environment variables by which so many processes share the cores, which libraries read as they are loaded."""
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max((os.cpu_count() or 1) // processes, 1)))}


class EarlyRanks:
    """Context of ranks that wait. Those that are not admitted before its end are killed. Signals by which a run saves reach none
    before it is admitted.

    processes: of one nothing is started. waiting: each with the launcher's end of its socket.
    """

    def __init__(self, command: list[str], processes: int):
        self.command = command
        self.environment = {**os.environ, **core_share(max(processes, 1)), LAUNCHER: str(os.getpid())}
        self.waiting: list[tuple[subprocess.Popen, socket.socket]] = []
        # Ranks inherit the mask: the launcher answers these signals, and waits for them.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, saving_signals())
        try:
            for rank in range(processes if processes > 1 else 0):
                ours, theirs = socket.socketpair()
                handle = theirs.fileno()
                known = {**self.environment, "RANK": str(rank), "WORLD_SIZE": str(processes), _WAITS: str(handle)}
                output: Any = subprocess.DEVNULL if rank else None
                with theirs:
                    process = subprocess.Popen(command, env=known, stdout=output, stderr=output, pass_fds=(handle,))
                self.waiting.append((process, ours))
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def __enter__(self) -> EarlyRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Kill those that wait."""
        for process, ours in self.waiting:
            process.kill()
            ours.close()
        for process, _ in self.waiting:
            process.wait()
        self.waiting.clear()

    def admit(self, environment: dict[str, str], log: IO | None, descriptors: tuple[int, ...]) -> subprocess.Popen:
        """Let the next rank begin, with all of this environment, its output in this file, and these descriptors open. Their numbers
        are others there, also in the values of LISTENER and ENDED."""
        process, ours = self.waiting.pop(0)
        changed = {name: value for name, value in environment.items() if self.environment.get(name) != value}
        # Of a rank that has ended the pipe is broken, which the launcher will see.
        with ours, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            socket.send_fds(ours, [b"\n"], [*descriptors, *([log.fileno()] if log else [])])
            ours.sendall(json.dumps([changed, descriptors]).encode())
        return process


def waits() -> bool:
    """True in a rank that is to await its admission."""
    return _WAITS in os.environ


def await_admission() -> None:
    """Take what `admit` sends, in a rank that waits. Ends the process if the launcher admits none."""
    with socket.socket(fileno=int(os.environ.pop(_WAITS))) as theirs:
        _, handles, _, _ = socket.recv_fds(theirs, 1, 8)
        content = b"".join(iter(lambda: theirs.recv(1 << 16), b""))
    if not content:
        os._exit(1)
    changed, descriptors = json.loads(content)
    os.environ.update(changed)
    here = dict(zip(map(str, descriptors), map(str, handles), strict=False))
    for name in (LISTENER, ENDED):
        if changed.get(name) in here:  # rank 0 alone has the socket
            os.environ[name] = here[changed[name]]
    for log in handles[len(descriptors) :]:
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, saving_signals())
