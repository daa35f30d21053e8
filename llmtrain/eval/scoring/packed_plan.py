"""Plan for scoring rows in packed sequences, in which a prefix that several rows share is stored once.

There is no padding, and no cache is copied: attention and scans follow each segment's ancestors within the sequence
(kernels/attention/prefix_tree.py, kernels/ssd/prefix_tree.py). Models whose blocks cannot do so read with a cache
(prefix_plan.py). Imports no torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from llmtrain.eval.scoring.batching import Row, Rows
from llmtrain.eval.scoring.prefix_plan import RowGroup, SharingCosts, row_groups, split_by_root

_COSTS = SharingCosts(split=2, root=8)
"""Costs of packing: nothing is copied, but a segment and its ancestors are read one after the other."""


class Segment(NamedTuple):
    """Tokens that follow those of the segments `ancestors` (positions in the pack, outermost first).

    row: index of the row whose continuation they end with; None for a shared prefix.
    """

    tokens: tuple[int, ...]
    ancestors: tuple[int, ...] = ()
    row: int | None = None


@dataclass(frozen=True)
class PackedPlan:
    """packs: segments of each forward pass so far."""

    rows: list[Row]
    packs: list[list[Segment]] = field(default_factory=list)


def pack_rows(rows: Rows, capacity: int) -> Iterator[list[Segment]]:
    """Segments of one forward pass after the other, lazily.

    capacity: tokens per pass, exceeded only by a single row that is longer.
    """
    packer = _Packer(capacity)
    for root, groups in split_by_root(row_groups(rows, _COSTS), _COSTS, call=0):
        for group in groups:
            for prefix, suffixes in _split(rows.rows, group, len(root), capacity - len(root)):
                packer.add(root, prefix, suffixes)
            while len(packer.packs) > 1:
                yield packer.packs.pop(0)
    packer.finish()
    yield from packer.packs


def _split(
    rows: Sequence[Row], group: RowGroup, root: int, capacity: int
) -> Iterator[tuple[tuple[int, ...], list[tuple[int, tuple[int, ...]]]]]:
    """(prefix, suffixes as (row, tokens)) of a group, split so that each part fits the capacity."""
    cut = group.shared if len(group.rows) > 1 else root
    prefix = group.prefix[root:cut]
    suffixes: list[tuple[int, tuple[int, ...]]] = []
    taken = len(prefix)
    for row in group.rows:
        suffix = rows[row].tokens[cut:-1]
        if suffixes and taken + len(suffix) > capacity:
            yield prefix, suffixes
            suffixes, taken = [], len(prefix)
        suffixes.append((row, suffix))
        taken += len(suffix)
    yield prefix, suffixes


class _Packer:
    """Order of a pack: a root, the prefixes that follow it, then all suffixes of these, as segments with the same ancestors
    must be neighbours for attention."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.packs: list[list[Segment]] = []
        self._room = 0
        self._root: tuple[int, ...] = ()
        self._root_at: tuple[int, ...] = ()
        self._suffixes: list[Segment] = []

    def add(
        self, root: tuple[int, ...], prefix: tuple[int, ...], suffixes: Sequence[tuple[int, tuple[int, ...]]]
    ) -> None:
        size = len(prefix) + sum(len(tokens) for _, tokens in suffixes)
        known = root == self._root
        if not self.packs or size + (0 if known else len(root)) > self._room:
            self.finish()
            self.packs.append([])
            self._room, known = self.capacity, False
        if not known:
            self.finish()
            self._root, self._root_at = root, self._put(Segment(root)) if root else ()
        ancestors = self._root_at
        if prefix:
            ancestors = (*ancestors, *self._put(Segment(prefix, ancestors)))
        for row, tokens in suffixes:
            segment = Segment(tokens, ancestors, row)
            if prefix:
                self._suffixes.append(segment)
                self._room -= len(tokens)
            else:
                self._put(segment)

    def finish(self) -> None:
        """Append the suffixes that wait for the end of their root, or of the pack."""
        if self._suffixes:
            self.packs[-1] += self._suffixes
            self._suffixes = []

    def _put(self, segment: Segment) -> tuple[int, ...]:
        self.packs[-1].append(segment)
        self._room -= len(segment.tokens)
        return (len(self.packs[-1]) - 1,)
