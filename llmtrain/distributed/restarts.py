"""Restarts in place: a run whose ranks died goes on from its newest checkpoint, on the ranks that are left."""

import signal
from collections.abc import Callable

from llmtrain.errors import Preempted, UserError
from llmtrain.logs import log

_FINAL = (0, UserError.status, 128 + signal.SIGINT, Preempted.status)
"""Exit statuses that another start would not change: success, a wrong input, Ctrl-C, SIGTERM."""


def run_with_restarts(
    start: Callable[[int, int], int],
    processes: int,
    most: int,
    divides: Callable[[int], bool],
    available: Callable[[], int] | None = None,
) -> int:
    """Start the ranks, and again after a failure, at most `most` times. Returns the last exit status.

    start: runs so many ranks as the attempt of this number, from 0, and returns their exit status. divides: whether a run of so
    many ranks can be. available: the number of ranks for which there is a place after a failure; default: as many as before.
    """
    attempt = 0
    while True:
        status = start(processes, attempt)
        if status in _FINAL or attempt == most:
            return status
        places = min(processes, available()) if available else processes
        left = next((ranks for ranks in range(places, 0, -1) if divides(ranks)), 0)
        if not left:
            log.error(
                f"no restart: {places} of {processes} GPUs are left, and no number of ranks up to that divides the batch"
            )
            return status
        attempt += 1
        fewer = f", {left} instead of {processes}" if left != processes else ""
        log.warning(f"status {status}: the ranks start again{fewer}, from the newest checkpoint ({attempt} of {most})")
        processes = left
