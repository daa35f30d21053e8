"""Orders of the rows of published tensors (Part.order): for each of our rows in turn, its number there."""

from collections.abc import Sequence


def by_group(rows: int, kinds: Sequence[int]) -> tuple[int, ...]:
    """The order of a tensor whose rows are all kinds of the first group, then of the second, and so on; ours are the first kind of
    all groups, then the second. For example q, k and v of each head. kinds: rows of each kind within one group."""
    each, starts = sum(kinds), [sum(kinds[:i]) for i in range(len(kinds))]
    return tuple(
        group + start + row
        for start, count in zip(starts, kinds, strict=True)
        for group in range(0, rows, each)
        for row in range(count)
    )


def pairs_apart(heads: int, head_dim: int, first: int = 0, last: int | None = None) -> tuple[int, ...]:
    """The order of a tensor in which rotary positions turn neighbouring channels of each head, 2 i and 2 i + 1, from `first` to
    `last`; ours turn i and i + n / 2 of these n channels. The scores of queries and keys are the same."""
    last = head_dim if last is None else last
    head = [*range(first), *range(first, last, 2), *range(first + 1, last, 2), *range(last, head_dim)]
    return tuple(h * head_dim + row for h in range(heads) for row in head)
