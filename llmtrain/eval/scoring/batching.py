"""Rows of tokens that fit the model's window, made from requests; and batches with little padding. Imports no torch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from llmtrain.eval.errors import EvalError
from llmtrain.eval.prompts.requests import LoglikelihoodRequest

Item = TypeVar("Item")


class Row(NamedTuple):
    """Token ids of context and continuation, cut to the window; all but the last are read. scored: those of the continuation."""

    tokens: tuple[int, ...]
    scored: int

    @property
    def length(self) -> int:
        """Tokens read."""
        return len(self.tokens) - 1

    @property
    def start(self) -> int:
        """Position of the token whose logits score the first token of the continuation."""
        return len(self.tokens) - 1 - self.scored


@dataclass(frozen=True)
class Rows:
    """Distinct rows of some requests.

    row_of: index of each request's row. truncated: tokens cut from each request's context. document: index of each row's document
    (that of its first request).
    """

    rows: list[Row]
    row_of: list[int]
    truncated: list[int]
    document: list[int]


def make_rows(requests: Sequence[LoglikelihoodRequest], window: int) -> Rows:
    """Rows of the requests; contexts that are too long are cut on the left.

    window: tokens that the model can read, one less than context and continuation may have together. Raises EvalError for an empty
    context or continuation, and for a continuation longer than the window.
    """
    made = Rows([], [], [], [])
    known: dict[Row, int] = {}
    for request in requests:
        scored = len(request.continuation)
        if not request.context or not 0 < scored <= window:
            raise EvalError(_refusal(request, window))
        kept = request.context[max(len(request.context) + scored - window - 1, 0) :]
        row = Row(kept + request.continuation, scored)
        index = known.setdefault(row, len(made.rows))
        if index == len(made.rows):
            made.rows.append(row)
            made.document.append(request.document)
        made.row_of.append(index)
        made.truncated.append(len(request.context) - len(kept))
    return made


def _refusal(request: LoglikelihoodRequest, window: int) -> str:
    where = f"document {request.document}, option {request.option}"
    if not request.context or not request.continuation:
        empty = "continuation" if request.context else "context"
        return f"{where}: an empty {empty} cannot be scored; give it at least one token"
    length = len(request.continuation)
    return f"{where}: a continuation of {length} tokens does not fit the model's window of {window}"


@dataclass(frozen=True)
class Limits:
    """Limits of one forward pass.

    tokens: most tokens per pass, padding included. call_cost: fixed cost of a pass, in tokens. row_bytes, token_bytes: memory of a
    row of a cache, and of each of its tokens; cache_bytes: most memory of all rows of one cache.
    """

    tokens: int
    call_cost: int
    row_bytes: int = 0
    token_bytes: int = 0
    cache_bytes: int = 2**62

    def rows(self, width: int, capacity: int) -> int:
        """Rows that may read `width` tokens each into a cache of `capacity` tokens; at least one."""
        held = self.row_bytes + self.token_bytes * capacity
        return max(min(self.tokens // max(width, 1), self.cache_bytes // max(held, 1)), 1)


def batch_sorted(
    items: Sequence[Item],
    *,
    rows: Callable[[Item], int],
    waste: Callable[[Item, Item], int],
    call_cost: int,
    fits: Callable[[Item, Item], bool] = lambda first, item: True,
) -> Iterator[list[Item]]:
    """Cut a sorted sequence into batches.

    rows(first): most items of a batch that begins with `first`. waste(first, item): tokens of padding that `item` adds to it.
    call_cost: most tokens wasted in a batch. fits(first, item): False where `item` needs another batch.
    """
    batch: list[Item] = []
    wasted = 0
    for item in items:
        if batch:
            wasted += waste(batch[0], item)
            if len(batch) >= rows(batch[0]) or wasted > call_cost or not fits(batch[0], item):
                yield batch
                batch, wasted = [], 0
        batch.append(item)
    if batch:
        yield batch
