"""Work on several files at a time. No torch here."""

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Result = TypeVar("Result")


def in_threads(work: Callable[[str], Result], names: Iterable[str], threads: int) -> list[Result]:
    """Results of work(name), in order. Raises the first failure; work that has not begun by then is not begun."""
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(work, name) for name in names]
        try:
            return [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)


def one_at_a_time(progress: Callable[[int], None]) -> Callable[[int], None]:
    """The same callback for several threads: it is called by one of them at a time."""
    lock = threading.Lock()

    def advance(size: int) -> None:
        with lock:
            progress(size)

    return advance
