"""SIGTERM before and after the steps of a run, when there is nothing to save: status 143 at once. No torch here."""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator

from llmtrain.distributed.run_lock import release_all
from llmtrain.errors import Preempted


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Context in which SIGTERM ends the process with status 143, its run's folder released, unless a handler of another kind is
    set meanwhile (see Preemption).

    The handler of a process that waits in C (for other ranks, say) would be called only after that. So the interpreter also
    writes the signal's number to a pipe, from which a thread reads it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    ending = threading.Lock()

    def end(*_: object) -> None:
        if not ending.acquire(blocking=False):  # by the other of this handler and the thread
            return
        if int(os.environ.get("RANK", 0)) == 0:
            text = "SIGTERM: ending; there is nothing to save\n"
            os.write(sys.__stderr__.fileno() if sys.__stderr__ else 2, text.encode())
        release_all()
        os._exit(Preempted.status)

    def watch() -> None:
        while number := os.read(reader, 1):
            if number[0] == signal.SIGTERM and signal.getsignal(signal.SIGTERM) is end:
                end()
        os.close(reader)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = signal.signal(signal.SIGTERM, end)
    woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=watch, name="SIGTERM", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(woken_before)
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)
        os.close(writer)


@contextlib.contextmanager
def handlers_kept() -> Iterator[None]:
    """Context for imports of libraries that install signal handlers: Composer's would end a rank of several with status 1."""
    install = signal.signal
    signal.signal = lambda number, _: signal.getsignal(number)
    try:
        yield
    finally:
        signal.signal = install
