"""The logger of the program: progress and notices, with time and rank wherever several ranks write.

The answer to a command (a table, a completion, a path) is printed to standard output and not logged.

`log` is for notices of this process and goes to standard error. `run_log`, its child, is for the course of a training run,
which every rank logs alike: rank 0 alone shows it, on standard output. `file_log` is for files alone. Rank 0 shows the
message alone; other ranks, whose output may be a file or a terminal that all ranks share, put time and rank before it.
"""

import contextlib
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from llmtrain.errors import without_credentials

log = logging.getLogger("llmtrain")
run_log = logging.getLogger("llmtrain.run")
file_log = logging.getLogger("llmtrain.file")


def _rank() -> int:
    return int(os.environ.get("RANK", 0))


class _Timed(logging.Formatter):
    def __init__(self) -> None:
        super().__init__("%(asctime)s rank %(rank)s  %(message)s", datefmt="%Y-%m-%d %H:%M:%S")

    def format(self, record: logging.LogRecord) -> str:
        record.rank = _rank()
        return without_credentials(super().format(record))


class _Terminal(logging.Handler):
    """Standard output and error as they are when a message arrives: a progress bar or a test may have replaced them."""

    timed = _Timed()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == file_log.name:
            return
        text = self.timed.format(record) if _rank() else without_credentials(record.getMessage())
        # Standard output may be a file on a full disk, or a terminal that is gone: no reason to end a run.
        with contextlib.suppress(OSError):
            print(text, file=sys.stdout if record.name == run_log.name else sys.stderr, flush=True)


class _File(logging.FileHandler):
    """A full disk must not fail the run, nor fill the terminal with tracebacks: it is reported once, and again when it is over."""

    failed = False
    _errors = 0

    def emit(self, record: logging.LogRecord) -> None:
        before, self._errors = self.failed, 0
        super().emit(record)
        if before and not self._errors and self.failed:
            self.failed = False
            log.info(f"{self.baseFilename} is written again")

    def handleError(self, record: logging.LogRecord) -> None:
        self._errors += 1
        if not self.failed:
            self.failed = True
            log.warning(
                f"WARNING: {self.baseFilename} cannot be written: {sys.exc_info()[1]}; the run goes on without it"
            )

    def close(self) -> None:
        with contextlib.suppress(OSError):
            super().close()


@contextlib.contextmanager
def copied_to(path: Path) -> Iterator[None]:
    """Inside, everything logged is also appended to a file, with time and rank; nothing when the file cannot be opened."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handler = _File(path)
    except OSError:
        yield
        return
    handler.setFormatter(_Timed())
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


run_log.addFilter(lambda record: _rank() == 0)
log.addHandler(_Terminal())
log.setLevel(logging.INFO)
log.propagate = False
