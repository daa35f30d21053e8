"""A plan for scoring rows in which what they have in common is read once. No torch here.

Rows share tokens on two levels: a document's choices share its question (a unit), and documents may share a few-shot
prefix (a trunk). The rows of a cache must end together, which leaves two ways to continue units of different lengths:
without a trunk they are padded on the left; after one, which is in the cache already, all are cut where the shortest
ends, and what is left of the longer ones is read with their choices. Choices of one token need no continuation at all:
the logits after the question score each of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, pairwise
from operator import itemgetter

from llmtrain.eval.scoring.batching import Limits, Row, Rows, pack


@dataclass(frozen=True)
class Prices:
    """What sharing costs, in tokens. split: of each row that is split into a shared part and the rest; trunk: of each
    document that follows a trunk."""

    split: int
    trunk: int


_CACHED = Prices(split=8, trunk=16)
"""The cache is copied for every row; what follows a trunk cannot be padded on the left."""


@dataclass(frozen=True)
class Tail:
    """What is read of a row when its prefix is in the cache. parent: which prefix of the batch; row: in the plan's rows."""

    row: int
    parent: int
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """prefixes: token ids after the trunk, read once each (none: tails follow the trunk directly). pieces: of tails,
    each one call, padded on the right. ends: (row, prefix) of rows that lack but their last token then; with ends there
    are no pieces."""

    prefixes: list[tuple[int, ...]]
    pieces: list[list[Tail]]
    ends: list[tuple[int, int]] = field(default_factory=list)


@dataclass(frozen=True)
class Family:
    """Batches that begin with the same tokens, which may be none."""

    trunk: tuple[int, ...]
    batches: list[Batch]


@dataclass(frozen=True)
class Plan:
    """All that has to be read to score some rows, and what it costs in tokens."""

    rows: list[Row]
    families: list[Family] = field(default_factory=list)

    def batches(self) -> Iterator[Batch]:
        for family in self.families:
            yield from family.batches

    @property
    def tokens(self) -> int:
        """Tokens read, without padding."""
        total = sum(len(family.trunk) for family in self.families)
        for batch in self.batches():
            total += sum(map(len, batch.prefixes)) + sum(len(tail.tokens) for piece in batch.pieces for tail in piece)
        return total

    @property
    def slots(self) -> int:
        """Tokens read, padding included."""
        total = sum(len(family.trunk) for family in self.families)
        for batch in self.batches():
            total += len(batch.prefixes) * max(map(len, batch.prefixes), default=0)
            total += sum(len(piece) * max(len(tail.tokens) for tail in piece) for piece in batch.pieces)
        return total

    @property
    def calls(self) -> int:
        """Of the model."""
        reads = sum(bool(batch.prefixes) + len(batch.pieces) for batch in self.batches())
        return reads + sum(bool(family.trunk) for family in self.families)


@dataclass(frozen=True)
class Unit:
    """Rows of one document that begin alike. head: what they share, before the first token that decides a score; for a
    single row all of that. whole: they share all that is read of them, and score one token each. longest: of the rows."""

    rows: list[int]
    head: tuple[int, ...]
    longest: int
    whole: bool = False

    @property
    def shared(self) -> int:
        return len(self.head)


def make_plan(rows: Rows, limits: Limits, *, window: int, share: bool = True, padded: bool = True) -> Plan:
    """window: slots that a cache may have at most. share: False reads every row whole. padded: False for a model whose cache
    cannot begin with padding.
    """
    plan = Plan(rows.rows)
    if not share:
        plan.families.append(Family((), list(_whole(plan, range(len(rows.rows)), 0, limits))))
        return plan
    for trunk, some in shared_starts(units_of(rows, _CACHED), _CACHED, 2 * limits.patience):
        cut = trunk or not padded
        batches = _after_trunk(plan, some, len(trunk), limits) if cut else _without_trunk(plan, some, limits, window)
        plan.families.append(Family(trunk, list(batches)))
    return plan


def shared_starts(units: Iterable[Unit], prices: Prices, call: int) -> Iterator[tuple[tuple[int, ...], list[Unit]]]:
    """Units that begin with the same tokens (a trunk), and at last those that share none. call: what a trunk itself costs."""
    units = sorted(units, key=lambda unit: unit.head)
    common = [max(_common(a.head, b.head) - prices.trunk, 0) for a, b in pairwise(units)]
    rest: list[Unit] = []
    at = 0
    for start, stop, shared in best_runs(common, call):
        rest += units[at:start]
        at = stop
        yield units[start].head[: shared + prices.trunk], units[start:stop]
    yield (), [*rest, *units[at:]]


def units_of(rows: Rows, prices: Prices) -> Iterator[Unit]:
    documents: dict[int, list[int]] = {}
    for row, document in enumerate(rows.document):
        documents.setdefault(document, []).append(row)
    for group in documents.values():
        read = sorted((rows.rows[row].tokens[:-1], rows.rows[row].scored, row) for row in group)
        alike = [[row for _, _, row in same] for _, same in groupby(read, key=itemgetter(0, 1))]
        yield from _of_document(rows, alike, prices.split)


def _of_document(rows: Rows, alike: list[list[int]], price: int) -> Iterator[Unit]:
    """alike: a document's rows; those that read the same tokens, and differ in the last that is scored, in one list."""
    found = [rows.rows[same[0]] for same in alike]
    common = [min(_common(a.tokens, b.tokens), a.start, b.start) for a, b in pairwise(found)]
    worth = [max(tokens - price, 0) for tokens in common]
    at = 0
    for start, stop, shared in [*best_runs(worth, price), (len(alike), len(alike), 0)]:
        for same, row in zip(alike[at:start], found[at:start], strict=True):
            if row.scored == 1:
                yield Unit(same, row.tokens[: row.start], row.length, whole=len(same) > 1)
            else:
                yield from (Unit([one], row.tokens[: row.start], row.length) for one in same)
        if start < stop:
            together = [row for same in alike[start:stop] for row in same]
            head = found[start].tokens[: shared + price]
            yield Unit(together, head, max(row.length for row in found[start:stop]))
        at = stop


def best_runs(common: Sequence[int], price: int) -> list[tuple[int, int, int]]:
    """Which neighbours in a sorted sequence should share what they have in common: (start, stop, tokens) of each run.

    common: tokens that items i and i + 1 begin with alike. A run of n items saves (n - 1) times the least of its
    `common`, and costs `price`. Each takes all neighbours that have so much in common; among such runs the sum is the
    largest possible. Items outside of runs share nothing.
    """
    # Intervals whose items have `depth` tokens in common form a tree. Each is closed once; then it is a run of its own,
    # or leaves its parts as they are. Of an open one: depth, first item, gain and runs of its parts.
    open_: list[tuple[int, int, int, list[tuple[int, int, int]]]] = [(0, 0, 0, [])]
    for i, depth in enumerate([*common, 0]):
        left, gain, runs = i, 0, []
        while open_[-1][0] > depth:
            inner, left, gain, runs = open_.pop()
            if inner * (i - left) - price > gain:
                gain, runs = inner * (i - left) - price, [(left, i + 1, inner)]
            outer, first, before, earlier = open_[-1]
            if outer >= depth:
                earlier += runs
                open_[-1] = (outer, first, before + gain, earlier)
                gain, runs = 0, []
        if open_[-1][0] < depth:
            open_.append((depth, left, gain, runs))
    return open_[0][3]


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two sequences begin with alike."""
    alike, apart = 0, min(len(a), len(b)) + 1
    while apart - alike > 1:
        middle = (alike + apart) // 2
        if a[alike:middle] == b[alike:middle]:
            alike = middle
        else:
            apart = middle
    return alike


def _without_trunk(plan: Plan, units: list[Unit], limits: Limits, window: int) -> Iterator[Batch]:
    """Heads of several rows are read first, padded on the left; single rows whole."""
    single = [unit for unit in units if len(unit.rows) == 1]
    yield from _ends(plan, [unit for unit in units if unit.whole], limits)
    several = sorted((u for u in units if len(u.rows) > 1 and not u.whole), key=lambda unit: -unit.shared)
    batches = pack(
        several,
        rows=lambda first: limits.rows(first.shared, first.shared),
        waste=lambda first, unit: first.shared - unit.shared,
        patience=limits.patience,
        fits=lambda first, unit: first.shared + unit.longest - unit.shared <= window,
    )
    for batch in batches:
        if sum((len(unit.rows) - 1) * unit.shared for unit in batch) < limits.patience:
            single += batch  # reading them again costs less than one more call
            continue
        tails = _tails(plan, batch, [unit.shared for unit in batch])
        yield Batch([unit.head for unit in batch], _pieces(tails, max(unit.shared for unit in batch), limits))
    yield from _whole(plan, [row for unit in single for row in unit.rows], 0, limits)


def _ends(plan: Plan, units: list[Unit], limits: Limits) -> Iterator[Batch]:
    """Choices of one token."""
    inputs = {unit.rows[0]: plan.rows[unit.rows[0]].tokens[:-1] for unit in units}
    batches = pack(
        sorted(units, key=lambda unit: -unit.longest),
        rows=lambda first: limits.rows(first.longest, first.longest),
        waste=lambda first, unit: first.longest - unit.longest,
        patience=limits.patience,
    )
    for batch in batches:
        ends = [(row, parent) for parent, unit in enumerate(batch) for row in unit.rows]
        yield Batch([inputs[unit.rows[0]] for unit in batch], [], ends)


def _after_trunk(plan: Plan, units: list[Unit], trunk: int, limits: Limits) -> Iterator[Batch]:
    """Heads are cut where the shortest of the batch ends. trunk: may be 0."""
    single = [row for unit in units if len(unit.rows) == 1 for row in unit.rows]
    several = sorted((unit for unit in units if len(unit.rows) > 1), key=lambda unit: unit.shared)
    batches = pack(
        several,
        rows=lambda first: limits.rows(first.shared - trunk, first.shared),
        waste=lambda first, unit: (unit.shared - first.shared) * (len(unit.rows) - 1),
        patience=limits.patience,
    )
    for batch in batches:
        cut = batch[0].shared
        saved = sum((len(unit.rows) - 1) * (cut - trunk) for unit in batch)
        if cut == trunk or saved < limits.patience:
            single += [row for unit in batch for row in unit.rows]
            continue
        tails = _tails(plan, batch, [cut] * len(batch))
        yield Batch([unit.head[trunk:cut] for unit in batch], _pieces(tails, cut, limits))
    yield from _whole(plan, single, trunk, limits)


def _whole(plan: Plan, rows: Sequence[int], trunk: int, limits: Limits) -> Iterator[Batch]:
    tails = [Tail(row, 0, plan.rows[row].tokens[trunk:-1]) for row in rows]
    yield from (Batch([], [piece]) for piece in _pieces(tails, trunk, limits))


def _tails(plan: Plan, units: list[Unit], cuts: list[int]) -> list[Tail]:
    return [
        Tail(row, parent, plan.rows[row].tokens[cut:-1])
        for parent, (unit, cut) in enumerate(zip(units, cuts, strict=True))
        for row in unit.rows
    ]


def _pieces(tails: list[Tail], before: int, limits: Limits) -> list[list[Tail]]:
    """before: slots of the cache that are taken already."""
    return list(
        pack(
            sorted(tails, key=lambda tail: -len(tail.tokens)),
            rows=lambda first: limits.rows(len(first.tokens), before + len(first.tokens)),
            waste=lambda first, tail: len(first.tokens) - len(tail.tokens),
            patience=limits.patience,
        )
    )
