"""Retries with exponential backoff and jitter, bounded in number."""

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts, and the longest of the pauses between them, in seconds.

    The n-th pause is drawn evenly from [0, min(longest, first * 2^n)] ("full jitter", M. Brooker, Exponential Backoff And
    Jitter, AWS Architecture Blog, 2015), so that the nodes of a run do not all come back at once. At most 52 s in all.
    """

    attempts: int = 8
    first: float = 0.5
    longest: float = 20.0

    def pauses(self) -> Iterator[float]:
        """A pause before every attempt but the first."""
        for n in range(self.attempts - 1):
            yield random.uniform(0, min(self.longest, self.first * 2**n))

    def call(self, action: Callable[[], T], transient: Callable[[Exception], bool]) -> T:
        """Return action(); called again while its exceptions are `transient`. Raises its last exception, or one that is not."""
        for pause in self.pauses():
            try:
                return action()
            except Exception as error:
                if not transient(error):
                    raise
            time.sleep(pause)
        return action()
