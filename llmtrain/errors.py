"""The exit statuses of every command, and the errors that carry them.

0 done · 1 failed on the way · 2 the request was wrong · 130 interrupted (Ctrl-C); a run that trains has saved after a step
141 nobody reads the output any more (`| head`) · 143 preempted (SIGTERM), saved after a step

The text of an error below is all that a user needs, and is printed alone; so is an OSError that names a file and what its disk,
its permissions or its name do not allow. Any other exception is a fault of the program, of a library or of the machine: status 1,
with its traceback.
"""

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

INTERRUPTED = 128 + signal.SIGINT
_OF_NAMES = {errno.ENAMETOOLONG, errno.ELOOP, errno.EISDIR, errno.ENOTDIR, errno.ENOTEMPTY, errno.EINVAL, errno.ENXIO}
_OF_DISKS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EPERM, errno.EFBIG, errno.EIO, errno.ESTALE}
_USER_OF_URL = re.compile(r"""([A-Za-z][A-Za-z0-9+.-]*://)[^/\s'"<>]+@""")


class UserError(ValueError):
    """The request was wrong: a config, a file or an option. The message says what was found and what to change."""

    status = 2


class RunError(RuntimeError):
    """The request was right, and could not be carried out."""

    status = 1


class Preempted(Exception):
    """The run ended before its time, with a checkpoint at `step`. number: the signal (see saving_signals)."""

    status = 128 + signal.SIGTERM

    def __init__(self, step: int, folder: Path, number: int = signal.SIGTERM):
        super().__init__(f"{signal_name(number)}: saved step {step} in {folder}; the same command continues from there")
        self.step, self.status = step, 128 + number


def first_line(error: BaseException) -> str:
    """The first line of an error's text; the name of its class where it has none."""
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def first_few(items: Sequence[object], most: int = 3, between: str = ", ") -> str:
    """The first items, and how many more there are: `a, b, c and 5 more`."""
    shown, more = between.join(map(str, items[:most])), len(items) - most
    return f"{shown}{between.replace(',', '')}and {more:,} more" if more > 0 else shown


def named_line(error: BaseException, most: int | None = 160) -> str:
    """The first line of an error's class and text."""
    return f"{type(error).__name__}: {error}".partition("\n")[0][:most]


def without_credentials(text: str) -> str:
    """The text with *** for the user and password of every URL in it, as S3_ENDPOINT_URL or a proxy's address may have them."""
    return _USER_OF_URL.sub(r"\1***@", text)


def signal_name(number: int) -> str:
    return "Ctrl-C" if number == signal.SIGINT else signal.Signals(number).name


def about_a_file(error: BaseException) -> BaseException:
    """UserError or RunError for an error of the system about a file's name, permissions or disk; any other error as it is."""
    if isinstance(error, RuntimeError) and str(error).startswith("Symlink loop from"):  # Path.resolve
        return UserError(str(error))
    if isinstance(error, OSError) and error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return RunError(
            f"{os.strerror(error.errno)}: the disk is full that this command writes to"
        )  # a write names no file
    if isinstance(error, (EOFError, ValueError)) and "marshal data" in str(error):  # as a module is imported
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if file := frame.f_locals.get("bytecode_path"):
                return UserError(f"{file}: {error}; remove this file, which Python makes anew")
    if isinstance(error, FileNotFoundError) and "temporary directory" in str(error):  # tempfile.gettempdir
        return UserError("no folder for temporary files can be written; set TMPDIR to one that can")
    if not isinstance(error, OSError) or error.filename is None or error.errno not in _OF_NAMES | _OF_DISKS:
        return error
    found = error.filename if error.filename2 is None else error.filename2  # of a rename, the name that is taken
    name = os.fsdecode(found) if isinstance(found, (str, bytes)) else str(found)
    kind = UserError if error.errno in _OF_NAMES else RunError
    return kind(f"{name if len(name) <= 250 else name[:250] + '…'}: {error.strerror or os.strerror(error.errno)}")


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
    try:
        print(without_credentials(text), file=sys.stderr, flush=True)
    except OSError:  # a full disk
        _lead_nowhere(2)


def open_streams() -> None:
    """Let standard streams that are closed (`>&-`) lead nowhere: the next files to be opened would take their numbers, and get what
    is printed. A character that the terminal's encoding has not, or half of one in a file's name, is printed by its number."""
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free
            os.set_inheritable(number, True)
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, closefd=False))
        if mode == "w" and isinstance(stream := getattr(sys, name), io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def unwritable_output() -> OSError | None:
    """The error by which standard output cannot be written (a full disk, a reader that has ended), which leads nowhere from then
    on; None if it can be."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        _lead_nowhere(1)
        return error
    return None


def _lead_nowhere(number: int) -> None:
    """Drop what a standard stream holds and will get. Else Python would try to write it at its end, and end with status 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _has_reader() -> bool:
    """False if standard output is a pipe that nobody reads: one that is not buffered has nothing left to flush."""
    with contextlib.suppress(AttributeError, ValueError):  # a system without poll, an output without a number
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
        return not any(event & select.POLLERR for _, event in poll.poll(0))
    return True


def _status_without_output(error: OSError) -> int:
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    print_error(RunError(f"standard output cannot be written: {error.strerror}"))
    return RunError.status


def exit_status(command: Callable[[], int | None], report: Callable[[BaseException], None] = print_error) -> int:
    """The status that `command` returns (None: 0), or that of the error it raises, once `report` was called with it."""
    try:
        status = command() or 0
    except (Exception, KeyboardInterrupt) as error:
        unwritable = unwritable_output()
        if unwritable is None and isinstance(error, BrokenPipeError) and not _has_reader():
            unwritable = error
        if unwritable is None or not isinstance(error, OSError):
            error = about_a_file(error)
            report(error)
            return status_of(error)
        return _status_without_output(unwritable)
    unwritable = unwritable_output()
    return status if unwritable is None else _status_without_output(unwritable)


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Ends the process with the exit status of `main`."""
    sys.exit(exit_status(main))
