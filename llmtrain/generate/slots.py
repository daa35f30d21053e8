"""Memory of the requests that an engine decodes together: rows of one cache that join and leave at any step.

All rows end at the same slot, the next one that is written, as the rows of a padded batch do: a row of n tokens begins n slots
before it. So each step is the step of a batch, with the same kernels and CUDA graphs, and a request joins by a copy of its keys,
values and states. When the slots run out, all rows are moved to the left.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.generate.decoding import DecodeStep
from llmtrain.generate.sampling import on_device
from llmtrain.kernels.launch import cdiv
from llmtrain.models.cache import PAGE_SLOTS, Cache
from llmtrain.models.causal_lm import CausalLM

SPARE_SLOTS = 64
"""Least number of steps between two moves of all rows."""


def filled(count: int, leaving: Collection[int]) -> list[tuple[int, int]]:
    """(number, row that takes it) where some of `count` rows leave: the last rows that stay take the places before them."""
    left = count - len(leaving)
    free = sorted(row for row in leaving if row < left)
    return list(zip(free, (row for row in range(left, count) if row not in leaving), strict=True))


class Slots(Protocol):
    """Places for `rows` requests of up to max_len tokens. Live rows are numbered 0 .. n - 1, in the order of joining but for the
    last ones, which take the numbers of rows that leave (`filled`)."""

    def reader(self) -> Cache:
        """An empty cache of one row for a prompt. It ends with `join` or `discard`."""
        ...

    def discard(self, cache: Cache) -> None: ...

    def room(self, totals: Iterable[int]) -> int:
        """Number of the requests in front that can join now. totals: tokens of each, prompt and answer."""
        ...

    def join(self, cache: Cache, of: Sequence[int], lengths: Sequence[int], totals: Sequence[int]) -> None:
        """Add rows of a cache, of so many tokens each, as the last ones. The reader has one. totals: as for `room`."""
        ...

    def leave(self, rows: Collection[int]) -> None: ...

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        """Read one token per live row -> logits [n, vocab_size], until the next step."""
        ...

    def prepare(self) -> None:
        """Do what the first steps of each number of rows would do once. No row may be live."""
        ...

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states."""
        ...


class SharedSlots:
    """Slots that are read together, in one pass per step. Raises UserError where learned positions end before max_len."""

    def __init__(self, model: CausalLM, rows: int, max_len: int, pages: int | None = None):
        """pages: of the cache, which a subclass assigns to rows."""
        self.model, self.count = model, rows
        capacity = max_len + max(SPARE_SLOTS, max_len // 4)
        capacity = capacity if pages is None else cdiv(capacity, PAGE_SLOTS) * PAGE_SLOTS
        self.cache = model.empty_cache(rows, capacity, max_len, pages)
        self.prompt = model.empty_cache(1, max_len)
        self.first: list[int] = []
        self.steps: dict[int, DecodeStep] = {}
        self.padded = model.device.type == "cuda"
        """Rows are filled up to a power of two, for each of which there is a graph."""

    def reader(self) -> Cache:
        self.prompt.clear()
        return self.prompt

    def discard(self, cache: Cache) -> None:
        pass

    def room(self, totals: Iterable[int]) -> int:
        return self.count - len(self.first)

    def join(self, cache: Cache, of: Sequence[int], lengths: Sequence[int], totals: Sequence[int]) -> None:
        row, longest = len(self.first), max(lengths)
        assert row + len(of) <= self.count, "no row is free"
        if not self.first:
            self._set_length(longest)
        elif longest > self.cache.length:
            self._move(longest - self.cache.length)
        end, read = self.cache.length, cache.length
        self._begin([end - length for length in lengths], totals)
        some = torch.tensor(of, device=self.model.device) if len(of) > 1 else slice(of[0], of[0] + 1)
        # What is in the slots before a row's tokens is never seen.
        parts = slice(end - longest, end), slice(read - longest, read)
        self.cache.copy_rows(slice(row, row + len(of)), cache, some, *parts)

    def leave(self, rows: Collection[int]) -> None:
        if moves := filled(len(self.first), rows):
            self._copy(moves, slice(min(self.first[last] for _, last in moves), self.cache.length))
        for row, last in moves:
            self._set_first(row, self.first[last])
        del self.first[len(self.first) - len(rows) :]

    def _copy(self, moves: Sequence[tuple[int, int]], slots: slice) -> None:
        """Copy rows, (to, from), and their entries of these slots: a launch for each tensor, however many they are."""
        to, of = (on_device(rows, self.model.device) for rows in zip(*moves, strict=True))
        self.cache.copy_rows(to, self.cache, of, slots, slots)

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        cache, live = self.cache, len(tokens)
        assert live == len(self.first), "one token for each row"
        if cache.length == cache.capacity:
            self._move(-min(self.first))
        size = min(1 << (live - 1).bit_length(), self.count) if self.padded else live
        if size not in self.steps:
            view = cache.rows(slice(0, size))
            view.next = cache.next  # not a copy: the rows of all sizes end at one slot
            self.steps[size] = DecodeStep(self.model, view, steps=cache.capacity)
        step = self.steps[size]
        step.cache.length = cache.length
        given = tokens if isinstance(tokens, Tensor) else on_device(tokens, self.model.device)
        ids = F.pad(given, (0, size - live))
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            logits = step(ids)[:live]
        cache.length += 1
        return logits

    def prepare(self) -> None:
        assert not self.first, "rows are live"
        for size in sorted({min(1 << power, self.count) for power in range(self.count.bit_length() + 1)}):
            self.first = [0] * size
            self._set_length(1)
            for _ in range(2):  # kernels are compiled, then the graph is captured
                self.step([0] * size)
        self.first = []
        self.cache.clear()

    @property
    def nbytes(self) -> int:
        return self.cache.nbytes + self.prompt.nbytes

    def _begin(self, firsts: Sequence[int], totals: Sequence[int]) -> None:
        """Add rows that begin at these slots."""
        self.cache.first[len(self.first) : len(self.first) + len(firsts)] = on_device(firsts, self.model.device)
        self.first += firsts

    def _move(self, by: int) -> None:
        """Move all rows by a number of slots."""
        begin, end = min(self.first), self.cache.length
        self.cache.move(slice(0, len(self.first)), slice(begin, end), by)
        self._set_length(end + by)
        for row, first in enumerate(self.first):
            self._set_first(row, first + by)

    def _set_first(self, row: int, first: int) -> None:
        self.first[row : row + 1] = [first]
        self.cache.first[row] = first

    def _set_length(self, length: int) -> None:
        self.cache.length = length
        self.cache.next.fill_(length)


class SeparateSlots:
    """Slots that are read each in a pass of its own: what a request gets does not depend on the others in any bit."""

    def __init__(self, model: CausalLM, rows: int, max_len: int):
        self.model = model
        self.caches = [model.empty_cache(1, max_len) for _ in range(rows)]
        self.free = list(self.caches)
        self.live: list[Cache] = []

    def reader(self) -> Cache:
        cache = self.free.pop()
        cache.clear()
        return cache

    def discard(self, cache: Cache) -> None:
        self.free.append(cache)

    def room(self, totals: Iterable[int]) -> int:
        return len(self.caches) - len(self.live)

    def join(self, cache: Cache, of: Sequence[int], lengths: Sequence[int], totals: Sequence[int]) -> None:
        self.live.append(cache)

    def leave(self, rows: Collection[int]) -> None:
        self.free += [self.live[row] for row in rows]
        for row, last in filled(len(self.live), rows):
            self.live[row] = self.live[last]
        del self.live[len(self.live) - len(rows) :]

    def step(self, tokens: Sequence[int] | Tensor) -> Tensor:
        ids = (tokens if isinstance(tokens, Tensor) else on_device(tokens, self.model.device))[:, None, None]
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            return torch.cat([self.model.next_logits(*one) for one in zip(ids, self.live, strict=True)])

    def prepare(self) -> None:
        pass  # a prompt's first step is like any other

    @property
    def nbytes(self) -> int:
        return sum(cache.nbytes for cache in self.caches)
