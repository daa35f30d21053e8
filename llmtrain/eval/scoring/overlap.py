"""Host work in steps, which is overlapped with GPU work: preparing the next task's requests while a GPU is busy."""

import itertools
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")

Steps = Generator[None, None, Made]
"""A computation that yields every few milliseconds and returns its result."""


def run_steps(steps: Steps[Made]) -> Made:
    """Run a computation to its end and return its result."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            return end.value


LOOKAHEAD = 3
"""Items prepared before their turn: the time of a small one does not suffice for a large one that follows."""


class Prefetcher(Generic[Item, Made]):
    """Iterator over pairs (item, result of make(item)), in order; later items are prepared by calls of `step`.

    `step` is called while a GPU is busy and advances one of the next items by one step. An exception of make is raised when
    its item's turn comes. It uses no thread, because every torch operation releases the GIL, and a thread that computes
    in Python returns it only when its switch interval is over: 500 small operations took 4 s instead of 3 ms, and 70 ms with
    sys.setswitchinterval(5e-5).
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
        """Do one step of the next unfinished item; False if there is none."""
        for _, steps, made in itertools.islice(self._left, LOOKAHEAD):
            if made.done():
                continue
            try:
                next(steps)
            except StopIteration as end:
                made.set_result(end.value)
            except Exception as error:  # raised when the item's turn comes
                made.set_exception(error)
            return True
        return False


def no_host_work() -> bool:
    """Default of `host_work` arguments: nothing to do while the GPU is busy."""
    return False
