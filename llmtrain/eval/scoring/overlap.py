"""Work that is done before it is asked for: in steps, in the time in which somebody waits."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

Steps = Generator[None, None, Made]
"""Work of some milliseconds between one yield and the next, and what it comes to at last."""


def finished(steps: Steps[Made]) -> Made:
    """What they come to."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


FURTHER = 3
"""Items that are made before their turn: the time of a small one does not suffice for the large one that follows."""


class Ahead(Generic[Item, Made]):
    """Iterates over each item and what make(item) comes to, in order. What make raises is raised where its item's turn comes.

    `step`, called while there is nothing better to do, does some of the next items' work. No thread does it, because every
    operation of torch gives Python's lock away, and a thread that is busy in Python returns it only when its time is up: 500
    small operations took 4 s instead of 3 ms, and 70 ms with sys.setswitchinterval(5e-5).
    """

    def __init__(self, items: Iterable[Item], make: Callable[[Item], Steps[Made]]):
        self._left: deque[tuple[Item, Steps[Made], Future[Made]]] = deque(
            (item, make(item), Future()) for item in items
        )

    def __iter__(self) -> Iterator[tuple[Item, Made]]:
        while self._left:
            while not self._left[0][2].done():
                self.step()
            item, _, made = self._left.popleft()
            yield item, made.result()

    def step(self) -> bool:
        """Whether there was anything to do."""
        for _, steps, made in itertools.islice(self._left, FURTHER):
            if made.done():
                continue
            try:
                next(steps)
            except StopIteration as end:
                made.set_result(end.value)
            except Exception as error:  # waits for its item's turn
                made.set_exception(error)
            return True
        return False


def idle() -> bool:
    """A `step` of nothing."""
    return False
