"""Limits of time and size for what a file of plain data can make long: templates and regular expressions."""

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from llmtrain.errors import UserError

DOCUMENT_SECONDS = 10.0
"""Time for the templates of one document, which take microseconds."""
DOCUMENT_CHARACTERS = 2**28
"""Length of the text that a template makes of one document, at most."""
_inside = False


@contextmanager
def time_limit(seconds: float, what: str, error: type[UserError] = UserError) -> Iterator[None]:
    """Context that ends with an error of that class after so many seconds; what: its words for the message.

    A signal interrupts loops of templates and of regular expressions alike. Python delivers signals to the main thread, so that
    there is no limit in others, nor a second one inside of a limit. A timer that runs already goes on behind it.
    """
    global _inside
    if _inside or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, frame: Any) -> None:
        raise error(f"{what} took longer than {seconds:g} s; a loop or a regular expression in it may not end")

    _inside = True
    began, before = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        _inside = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - began), 1e-3), interval)
