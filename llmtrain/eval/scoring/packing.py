"""A plan for scoring rows by a model that can read trees: everything in long sequences, what rows share once in each.

Nothing is padded and no cache is copied. Attention and scans find what a segment continues elsewhere in the sequence
(kernels/attention/prefix_tree.py, kernels/ssd/prefix_tree.py); a model that cannot do so reads with a cache
(prefix_plan.py). No torch here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmtrain.eval.scoring.batching import Row, Rows
from llmtrain.eval.scoring.prefix_plan import Prices, Unit, shared_starts, units_of

_PRICES = Prices(split=2, trunk=8)
"""Nothing is copied, but a segment and what it continues are read one after the other."""


class Segment(NamedTuple):
    """tokens, read after those of the segments `above`, the outermost first. row: whose score they hold, if any."""

    tokens: tuple[int, ...]
    above: tuple[int, ...] = ()
    row: int | None = None


@dataclass(frozen=True)
class Packs:
    """packs: segments of one call of the model each; of those that were called for until now."""

    rows: list[Row]
    packs: list[list[Segment]] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(len(segment.tokens) for pack in self.packs for segment in pack)

    @property
    def slots(self) -> int:
        return self.tokens

    @property
    def calls(self) -> int:
        return len(self.packs)


def packs_of(rows: Rows, capacity: int) -> Iterator[list[Segment]]:
    """The segments of each call of the model; the first comes before the others are made.

    capacity: tokens of a call, exceeded only by a text that is longer.
    """
    packer = _Packer(capacity)
    for trunk, units in shared_starts(units_of(rows, _PRICES), _PRICES, call=0):
        for unit in units:
            for head, tails in _split(rows.rows, unit, len(trunk), capacity - len(trunk)):
                packer.add(trunk, head, tails)
            while len(packer.packs) > 1:
                yield packer.packs.pop(0)
    packer.finish()
    yield from packer.packs


def _split(
    rows: Sequence[Row], unit: Unit, trunk: int, capacity: int
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]]:
    """Head and tails (row, tokens) of a unit, in groups that fit."""
    cut = unit.shared if len(unit.rows) > 1 else trunk
    head = unit.head[trunk:cut]
    tails: list[tuple[int, tuple[int, ...]]] = []
    taken = len(head)
    for row in unit.rows:
        tail = rows[row].tokens[cut:-1]
        if tails and taken + len(tail) > capacity:
            yield head, tails
            tails, taken = [], len(head)
        tails.append((row, tail))
        taken += len(tail)
    yield head, tails


class _Packer:
    """In a pack come a trunk, then what continues it, then the tails of that: attention wants together what sees alike."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.packs: list[list[Segment]] = []
        self._room = 0
        self._trunk: tuple[int, ...] = ()
        self._trunk_at: tuple[int, ...] = ()
        self._tails: list[Segment] = []

    def add(self, trunk: tuple[int, ...], head: tuple[int, ...], tails: Sequence[tuple[int, tuple[int, ...]]]) -> None:
        size = len(head) + sum(len(tokens) for _, tokens in tails)
        known = trunk == self._trunk
        if not self.packs or size + (0 if known else len(trunk)) > self._room:
            self.finish()
            self.packs.append([])
            self._room, known = self.capacity, False
        if not known:
            self.finish()
            self._trunk, self._trunk_at = trunk, self._put(Segment(trunk)) if trunk else ()
        above = self._trunk_at
        if head:
            above = (*above, *self._put(Segment(head, above)))
        for row, tokens in tails:
            segment = Segment(tokens, above, row)
            if head:
                self._tails.append(segment)
                self._room -= len(tokens)
            else:
                self._put(segment)

    def finish(self) -> None:
        """No more of this trunk, or of this pack."""
        if self._tails:
            self.packs[-1] += self._tails
            self._tails = []

    def _put(self, segment: Segment) -> tuple[int, ...]:
        self.packs[-1].append(segment)
        self._room -= len(segment.tokens)
        return (len(self.packs[-1]) - 1,)
