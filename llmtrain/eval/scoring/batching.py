"""Requests -> rows of tokens that fit the window, and rows -> batches that waste little on padding. No torch here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from llmtrain.eval.errors import EvalError
from llmtrain.eval.scoring.request import Score

Item = TypeVar("Item")


class Row(NamedTuple):
    """tokens: context and continuation, cut to the window; all but the last are read. scored: how many at the end count."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def length(self) -> int:
        """Tokens read."""
        return len(self.tokens) - 1

    @property
    def start(self) -> int:
        """The token read whose successor is the first that is scored."""
        return len(self.tokens) - 1 - self.scored


@dataclass(frozen=True)
class Rows:
    """rows: no two alike. place: each request's row. truncated: tokens it lost. document: of the first request for a row."""

    rows: list[Row]
    place: list[int]
    truncated: list[int]
    document: list[int]


def rows_of(requests: Sequence[Score], window: int) -> Rows:
    """window: tokens a model can read, one less than context and continuation may have. Contexts lose their left end.

    Raises EvalError for a continuation that alone is too long, or that follows nothing: its first token has no score.
    """
    made = Rows([], [], [], [])
    known: dict[Row, int] = {}
    for request in requests:
        scored = len(request.continuation)
        if not request.context or not 0 < scored <= window:
            raise EvalError(_refusal(request, window))
        kept = request.context[max(len(request.context) + scored - window - 1, 0) :]
        row = Row(kept + request.continuation, scored)
        place = known.setdefault(row, len(made.rows))
        if place == len(made.rows):
            made.rows.append(row)
            made.document.append(request.document)
        made.place.append(place)
        made.truncated.append(len(request.context) - len(kept))
    return made


def _refusal(request: Score, window: int) -> str:
    where = f"document {request.document}, option {request.option}"
    if not request.context or not request.continuation:
        empty = "continuation" if request.context else "context"
        return f"{where}: an empty {empty} cannot be scored; give it at least one token"
    length = len(request.continuation)
    return f"{where}: a continuation of {length} tokens does not fit the model's window of {window}"


@dataclass(frozen=True)
class Limits:
    """How much one call of the model may hold.

    tokens: read at a time, padding included. patience: tokens that take as long as the fixed costs of one more call.
    row_bytes, token_bytes: memory of a row of a cache, and of each of its slots; cache_bytes: of all rows of one cache.
    """

    tokens: int
    patience: int
    row_bytes: int = 0
    token_bytes: int = 0
    cache_bytes: int = 2**62

    def rows(self, width: int, capacity: int) -> int:
        """Rows that may read `width` tokens each into a cache of `capacity` slots; at least one."""
        held = self.row_bytes + self.token_bytes * capacity
        return max(min(self.tokens // max(width, 1), self.cache_bytes // max(held, 1)), 1)


def pack(
    items: Sequence[Item],
    *,
    rows: Callable[[Item], int],
    waste: Callable[[Item, Item], int],
    patience: int,
    fits: Callable[[Item, Item], bool] = lambda first, item: True,
) -> Iterator[list[Item]]:
    """Cuts a sorted sequence into batches.

    rows(first): how many items a batch may have that begins with `first`. waste(first, item): tokens that are read for
    nothing when `item` is in it. A batch ends where what is wasted in it would pay for a call of its own.
    """
    batch: list[Item] = []
    wasted = 0
    for item in items:
        if batch:
            wasted += waste(batch[0], item)
            if len(batch) >= rows(batch[0]) or wasted > patience or not fits(batch[0], item):
                yield batch
                batch, wasted = [], 0
        batch.append(item)
    if batch:
        yield batch
