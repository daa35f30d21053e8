"""Plan for scoring rows with a cache, in which a prefix that several rows share is read once. Imports no torch.

Prefixes are shared on two levels: the choices of one document share its question (a RowGroup), and documents may share few-shot
examples (the root of a Subtree). All rows of a cache must have the same length, which leaves two ways to continue groups of
different lengths: without a root, their prefixes are padded on the left; after a root, which is in the cache already, all
prefixes are cut to the length of the shortest, and the rest of the longer ones is read with the suffixes. Choices of one
token need no suffix: the logits after the question score each of them.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

from llmtrain.data.chat.samples import common_length
from llmtrain.eval.scoring.batching import Limits, Row, Rows, batch_sorted


@dataclass(frozen=True)
class SharingCosts:
    """Costs of sharing, in tokens. split: per row that is split into prefix and suffix; root: per document that follows a root."""

    split: int
    root: int


_CACHED_COSTS = SharingCosts(split=8, root=16)
"""Costs with a cache: it is copied for every row; prefixes that follow a root cannot be padded on the left."""


@dataclass(frozen=True)
class Suffix:
    """Tokens of a row that are read after its prefix. row: index in the plan's rows; parent: index of the batch's prefix."""

    row: int
    parent: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """Prefixes that are read together, and what follows them.

    prefixes: token ids after the root, each read once; none where suffixes follow the root directly. suffix_batches: suffixes
    of one call each, padded on the right. next_tokens: (row, prefix) of rows of which only the last token is left after the
    prefix; a batch has either these or suffix_batches.
    """

    prefixes: list[tuple[int, ...]]
    suffix_batches: list[list[Suffix]]
    next_tokens: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Subtree:
    """Batches of rows that all begin with the tokens of `root`, which may be empty."""

    root: tuple[int, ...]
    batches: list[Batch]


@dataclass(frozen=True)
class Plan:
    """Everything that has to be read to score `rows`."""

    rows: list[Row]
    subtrees: list[Subtree] = field(default_factory=list)


@dataclass(frozen=True)
class RowGroup:
    """Rows of one document that share a prefix.

    prefix: shared tokens before the first one whose logits are scored; for a single row all of those. longest: tokens read of the
    longest row. single_token: the rows read the same tokens and score one token each.
    """

    rows: list[int]
    prefix: tuple[int, ...]
    longest: int
    single_token: bool = False

    @property
    def shared(self) -> int:
        return len(self.prefix)


def make_plan(rows: Rows, limits: Limits, *, window: int, share: bool = True, left_padding: bool = True) -> Plan:
    """Plan for `rows`.

    window: most tokens per row of a cache. share: False reads every row whole. left_padding: False for a model whose cache
    cannot begin with padding.
    """
    plan = Plan(rows.rows)
    if not share:
        plan.subtrees.append(Subtree((), list(_unshared(plan, range(len(rows.rows)), 0, limits))))
        return plan
    for root, some in split_by_root(row_groups(rows, _CACHED_COSTS), _CACHED_COSTS, 2 * limits.call_cost):
        cut = root or not left_padding
        batches = _after_root(plan, some, len(root), limits) if cut else _without_root(plan, some, limits, window)
        plan.subtrees.append(Subtree(root, list(batches)))
    return plan


def split_by_root(
    groups: Iterable[RowGroup], costs: SharingCosts, call: int
) -> Iterator[tuple[tuple[int, ...], list[RowGroup]]]:
    """(root, the groups whose prefixes begin with it); the groups without a root come last, as one pair with an empty root.

    call: cost in tokens of reading a root by itself.
    """
    groups = sorted(groups, key=lambda group: group.prefix)
    common = [max(common_length(a.prefix, b.prefix) - costs.root, 0) for a, b in pairwise(groups)]
    rest: list[RowGroup] = []
    at = 0
    for start, stop, shared in best_runs(common, call):
        rest += groups[at:start]
        at = stop
        yield groups[start].prefix[: shared + costs.root], groups[start:stop]
    yield (), [*rest, *groups[at:]]


def row_groups(rows: Rows, costs: SharingCosts) -> Iterator[RowGroup]:
    """Groups of each document's rows among which sharing a prefix pays."""
    documents: dict[int, list[int]] = {}
    for row, document in enumerate(rows.document):
        documents.setdefault(document, []).append(row)
    for group in documents.values():
        read = sorted((rows.rows[row].tokens[:-1], rows.rows[row].scored, row) for row in group)
        same_input = [[row for _, _, row in same] for _, same in groupby(read, key=itemgetter(0, 1))]
        yield from _document_groups(rows, same_input, costs.split)


def _document_groups(rows: Rows, same_input: list[list[int]], split_cost: int) -> Iterator[RowGroup]:
    """same_input: a document's rows, in lists of those that read the same tokens and differ in the last scored token only."""
    found = [rows.rows[same[0]] for same in same_input]
    common = [min(common_length(a.tokens, b.tokens), a.start, b.start) for a, b in pairwise(found)]
    gains = [max(tokens - split_cost, 0) for tokens in common]
    at = 0
    for start, stop, shared in [*best_runs(gains, split_cost), (len(same_input), len(same_input), 0)]:
        for same, row in zip(same_input[at:start], found[at:start], strict=True):
            if row.scored == 1:
                yield RowGroup(same, row.tokens[: row.start], row.length, single_token=len(same) > 1)
            else:
                yield from (RowGroup([one], row.tokens[: row.start], row.length) for one in same)
        if start < stop:
            members = [row for same in same_input[start:stop] for row in same]
            prefix = found[start].tokens[: shared + split_cost]
            yield RowGroup(members, prefix, max(row.length for row in found[start:stop]))
        at = stop


def best_runs(common: Sequence[int], cost: int) -> list[tuple[int, int, int]]:
    """Runs of neighbours in a sorted sequence that should share a prefix: (start, stop, shared tokens) of each run.

    common: length of the common prefix of items i and i + 1. A run of n items saves (n - 1) times the least of its `common`,
    and costs `cost`. Each run extends over all neighbours that share so many tokens; among such runs the total saving is
    maximal. Items outside of runs share nothing.
    """
    # Intervals whose items share `depth` tokens form a tree. When an interval is closed, it becomes one run, or keeps the
    # runs of its parts if these save more. Of an open interval: depth, first item, gain and runs of its parts.
    open_: list[tuple[int, int, int, list[tuple[int, int, int]]]] = [(0, 0, 0, [])]
    for i, depth in enumerate([*common, 0]):
        left, gain, runs = i, 0, []
        while open_[-1][0] > depth:
            inner, left, gain, runs = open_.pop()
            if inner * (i - left) - cost > gain:
                gain, runs = inner * (i - left) - cost, [(left, i + 1, inner)]
            outer, first, before, earlier = open_[-1]
            if outer >= depth:
                earlier += runs
                open_[-1] = (outer, first, before + gain, earlier)
                gain, runs = 0, []
        if open_[-1][0] < depth:
            open_.append((depth, left, gain, runs))
    return open_[0][3]


def _without_root(plan: Plan, groups: list[RowGroup], limits: Limits, window: int) -> Iterator[Batch]:
    """Batches of groups without a root: prefixes of several rows padded on the left, single rows whole."""
    single = [group for group in groups if len(group.rows) == 1]
    yield from _next_token_batches(plan, [group for group in groups if group.single_token], limits)
    several = sorted((u for u in groups if len(u.rows) > 1 and not u.single_token), key=lambda group: -group.shared)
    batches = batch_sorted(
        several,
        rows=lambda first: limits.rows(first.shared, first.shared),
        waste=lambda first, group: first.shared - group.shared,
        call_cost=limits.call_cost,
        fits=lambda first, group: first.shared + group.longest - group.shared <= window,
    )
    for batch in batches:
        if sum((len(group.rows) - 1) * group.shared for group in batch) < limits.call_cost:
            single += batch  # reading them again costs less than one more call
            continue
        suffixes = _suffixes(plan, batch, [group.shared for group in batch])
        yield Batch(
            [group.prefix for group in batch], _suffix_batches(suffixes, max(group.shared for group in batch), limits)
        )
    yield from _unshared(plan, [row for group in single for row in group.rows], 0, limits)


def _next_token_batches(plan: Plan, groups: list[RowGroup], limits: Limits) -> Iterator[Batch]:
    """Batches of groups whose choices have one token."""
    inputs = {group.rows[0]: plan.rows[group.rows[0]].tokens[:-1] for group in groups}
    batches = batch_sorted(
        sorted(groups, key=lambda group: -group.longest),
        rows=lambda first: limits.rows(first.longest, first.longest),
        waste=lambda first, group: first.longest - group.longest,
        call_cost=limits.call_cost,
    )
    for batch in batches:
        last = [(row, parent) for parent, group in enumerate(batch) for row in group.rows]
        yield Batch([inputs[group.rows[0]] for group in batch], [], last)


def _after_root(plan: Plan, groups: list[RowGroup], root: int, limits: Limits) -> Iterator[Batch]:
    """Batches of groups after `root` tokens (may be 0): prefixes cut to the length of the shortest of the batch."""
    single = [row for group in groups if len(group.rows) == 1 for row in group.rows]
    several = sorted((group for group in groups if len(group.rows) > 1), key=lambda group: group.shared)
    batches = batch_sorted(
        several,
        rows=lambda first: limits.rows(first.shared - root, first.shared),
        waste=lambda first, group: (group.shared - first.shared) * (len(group.rows) - 1),
        call_cost=limits.call_cost,
    )
    for batch in batches:
        cut = batch[0].shared
        saved = sum((len(group.rows) - 1) * (cut - root) for group in batch)
        if cut == root or saved < limits.call_cost:
            single += [row for group in batch for row in group.rows]
            continue
        suffixes = _suffixes(plan, batch, [cut] * len(batch))
        yield Batch([group.prefix[root:cut] for group in batch], _suffix_batches(suffixes, cut, limits))
    yield from _unshared(plan, single, root, limits)


def _unshared(plan: Plan, rows: Sequence[int], root: int, limits: Limits) -> Iterator[Batch]:
    """Batches of rows that share nothing after `root` tokens."""
    suffixes = [Suffix(row, 0, plan.rows[row].tokens[root:-1]) for row in rows]
    yield from (Batch([], [some]) for some in _suffix_batches(suffixes, root, limits))


def _suffixes(plan: Plan, groups: list[RowGroup], cuts: list[int]) -> list[Suffix]:
    return [
        Suffix(row, parent, plan.rows[row].tokens[cut:-1])
        for parent, (group, cut) in enumerate(zip(groups, cuts, strict=True))
        for row in group.rows
    ]


def _suffix_batches(suffixes: list[Suffix], before: int, limits: Limits) -> list[list[Suffix]]:
    """before: tokens in the cache already."""
    return list(
        batch_sorted(
            sorted(suffixes, key=lambda suffix: -len(suffix.tokens)),
            rows=lambda first: limits.rows(len(first.tokens), before + len(first.tokens)),
            waste=lambda first, suffix: len(first.tokens) - len(suffix.tokens),
            call_cost=limits.call_cost,
        )
    )
