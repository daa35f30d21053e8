"""Work that is done before it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")


def ahead(items: Iterable[Item], make: Callable[[Item], Made]) -> Iterator[tuple[Item, Made]]:
    """Each item and make(item), in order; while the caller works with one, a thread makes the next.

    What make raises is raised where its item's turn comes.
    """
    with ThreadPoolExecutor(1) as thread:
        waiting = None
        for item in items:
            began = item, thread.submit(make, item)
            if waiting is not None:
                yield waiting[0], waiting[1].result()
            waiting = began
        if waiting is not None:
            yield waiting[0], waiting[1].result()
