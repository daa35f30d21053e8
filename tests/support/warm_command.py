"""`llmtrain ARGUMENTS` as a process that need not import Composer, and whose ranks need not either: forks all the way."""

import contextlib
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from llmtrain.cli import main
from llmtrain.errors import exit_with
from tests.support.ranks import warm


class WarmCommand:
    """What `subprocess.Popen` would be of a command in `folder`. own_session: it leads a group of processes, as in a terminal."""

    def __init__(self, folder: Path, *arguments: str, own_session: bool = False):
        self._printed = folder / ".printed"
        given = (folder, arguments, self._printed, own_session)
        self._process = warm().Process(target=_serve, args=given, daemon=False)
        self._process.start()
        self.pid: int = self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        if self.returncode is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("llmtrain", timeout or 0.0)
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, None]:
        """Everything printed, once it has ended."""
        self.wait(timeout)
        return self._printed.read_text(), None


class _Rank:
    """What the launcher needs of `subprocess.Popen`, of a fork."""

    def __init__(self, command: list[str], env: dict[str, str], stdout: Any = None, pass_fds: Any = (), **_: Any):
        arguments = command[command.index("llmtrain.cli") + 1 :]
        handle = None if stdout is None else stdout.fileno()
        self._process = multiprocessing.get_context("fork").Process(target=_rank, args=(arguments, env, handle))
        self._process.start()

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired("rank", timeout or 0.0)

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        self._process.kill()


def _serve(folder: Path, arguments: tuple[str, ...], printed: Path, own_session: bool) -> None:
    if own_session:
        os.setsid()
    os.chdir(folder)
    with printed.open("w") as file:
        _print_to(file.fileno())
    multiprocessing.set_start_method("fork", force=True)  # for loader workers, as in a command of its own
    forks = SimpleNamespace(Popen=_Rank, STDOUT=subprocess.STDOUT, TimeoutExpired=subprocess.TimeoutExpired)
    sys.argv[1:] = arguments
    with patch("llmtrain.distributed.launch.subprocess", forks):
        exit_with(main)


def _rank(arguments: list[str], environment: dict[str, str], handle: int | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(environment)
    if handle is not None:
        _print_to(handle)
    sys.argv[1:] = arguments
    exit_with(main)


def _print_to(handle: int) -> None:
    for stream in (1, 2):
        os.dup2(handle, stream)
