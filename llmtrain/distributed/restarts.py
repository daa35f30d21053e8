"""Restarts in place: a run whose ranks died goes on from its newest checkpoint, on the ranks that are left."""

from collections.abc import Callable

from llmtrain.distributed.processes import saving_signals
from llmtrain.errors import UserError
from llmtrain.logs import log

_FINAL = (0, UserError.status, *(128 + number for number in saving_signals()))
"""Exit statuses that another start would not change: success, a wrong input, and those of signals by which a run saves and ends."""


def run_with_restarts(
    start: Callable[[int, int], int],
    processes: int,
    most: int,
    check: Callable[[int], object],
    available: Callable[[], int] | None = None,
) -> int:
    """Start the ranks, and again after a failure, at most `most` times. Returns the last exit status.

    start: runs so many ranks as the attempt of this number, from 0, and returns their exit status. check: raises UserError where
    a run of so many ranks cannot be. available: the number of ranks for which there is a place after a failure; default: as
    many as before.
    """
    attempt = 0
    while True:
        status = start(processes, attempt)
        if status in _FINAL or attempt == most:
            return status
        places = min(processes, available()) if available else processes
        left, reason = places, ""
        while left:
            try:
                check(left)
                break
            except UserError as error:
                left, reason = left - 1, reason or f", and no number of ranks up to that can run it:\n{error}"
        else:
            log.error(f"no restart: {places} of {processes} GPUs are left{reason}")
            return status
        attempt += 1
        fewer = f", {left} instead of {processes}" if left != processes else ""
        log.warning(f"status {status}: the ranks start again{fewer}, from the newest checkpoint ({attempt} of {most})")
        processes = left
