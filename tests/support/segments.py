"""StreamingDataset's shared memory in a process that outlives its datasets."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest.mock import patch


@contextmanager
def released_segments() -> Iterator[None]:
    """Release the shared memory of datasets made in the context at its end, not when the process ends.

    Segments would stay until then, and each later dataset of the process opens every one of them.
    """
    segments = _Exits()
    with patch("streaming.base.shared.memory.atexit", segments):
        yield
    segments.run()


class _Exits:
    """Replacement of `atexit`, where streaming registers the release."""

    def __init__(self) -> None:
        self.registered: list[Callable[[], None]] = []

    def register(self, function: Callable[[], None]) -> None:
        self.registered.append(function)

    def run(self) -> None:
        while self.registered:
            self.registered.pop()()
