"""The exit statuses of every command, and the errors that carry them.

0 done · 1 failed on the way · 2 the request was wrong · 130 interrupted (Ctrl-C) · 143 preempted (SIGTERM), saved after a step

The text of an error below is all that a user needs, and is printed alone. Any other exception is a fault of the program, of
a library or of the machine: status 1, with its traceback.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT


class UserError(ValueError):
    """The request was wrong: a config, a file or an option. The message says what was found and what to change."""

    status = 2


class RunError(RuntimeError):
    """The request was right, and could not be carried out."""

    status = 1


class Preempted(Exception):
    """The run ended before its time, with a checkpoint at `step`."""

    status = 128 + signal.SIGTERM

    def __init__(self, step: int, folder: Path):
        super().__init__(f"SIGTERM: saved step {step} in {folder}; the same command continues from there")
        self.step = step


def is_expected(error: BaseException) -> bool:
    """True if the error's message is all that a user needs; False for a fault, which needs its traceback."""
    return isinstance(error, (UserError, RunError, Preempted, KeyboardInterrupt))


def status_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    return error.status if isinstance(error, (UserError, RunError, Preempted)) else 1


def print_error(error: BaseException) -> None:
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    else:
        text = str(error) if is_expected(error) else "".join(traceback.format_exception(error)).rstrip()
    print(text, file=sys.stderr, flush=True)


def exit_status(command: Callable[[], int | None], report: Callable[[BaseException], None] = print_error) -> int:
    """The status that `command` returns (None: 0), or that of the error it raises, once `report` was called with it."""
    try:
        return command() or 0
    except (Exception, KeyboardInterrupt) as error:
        report(error)
        return status_of(error)


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit status of `main`."""
    sys.exit(exit_status(main))
