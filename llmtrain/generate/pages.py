"""Slots whose keys and values are in pages, so that requests take memory by their own length, not by the longest possible one."""

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

from llmtrain.errors import UserError
from llmtrain.generate.sampling import on_device
from llmtrain.generate.slots import SharedSlots, filled
from llmtrain.kernels.launch import cdiv
from llmtrain.models.cache import PAGE_SLOTS
from llmtrain.models.causal_lm import CausalLM


class PagedSlots(SharedSlots):
    """SharedSlots of which a request takes pages for its prompt and all its new tokens when it joins: what was admitted fits to
    its end. Rows move by whole pages, as numbers in a table. key_bytes: of keys and values in all. Raises UserError where a
    request of max_len tokens does not fit them, or the model keeps none."""

    def __init__(self, model: CausalLM, rows: int, max_len: int, key_bytes: int):
        one, two = (model.empty_cache(1, capacity).nbytes for capacity in (1, 2))
        page = PAGE_SLOTS * (two - one)
        if not page:
            raise UserError("this model keeps no keys: its requests take equal memory, of which rows say how many")
        pages = key_bytes // page
        if pages < most_pages(max_len) + 1:
            raise UserError(
                f"{key_bytes / 2**20:.1f} MiB hold keys of {pages * PAGE_SLOTS} tokens in pages of {PAGE_SLOTS}; a request of "
                f"{max_len} needs {(most_pages(max_len) + 1) * page / 2**20:.1f} MiB. Give more, or set a lower max_len"
            )
        super().__init__(model, rows, max_len, pages)
        self.free = list(range(pages - 1, 0, -1))  # page 0 takes what rows that are not live write
        self.pages: list[list[int]] = []

    def room(self, totals: Iterable[int]) -> int:
        left, found = len(self.free), 0
        for total in islice(totals, super().room(totals)):
            left -= most_pages(total)
            if left < 0:
                break
            found += 1
        return found

    def leave(self, rows: Collection[int]) -> None:
        for row in rows:
            self.free += self.pages[row]
        for row, last in filled(len(self.first), rows):
            self.pages[row] = self.pages[last]
        super().leave(rows)
        del self.pages[len(self.first) :]
        assert self.cache.table is not None
        self.cache.table[len(self.first) : len(self.first) + len(rows)] = 0

    def _copy(self, moves: Sequence[tuple[int, int]], slots: slice) -> None:
        super()._copy(moves, slice(0, 0))

    def _begin(self, firsts: Sequence[int], totals: Sequence[int]) -> None:
        super()._begin(firsts, totals)
        for row, total in zip(range(len(self.pages), len(self.first)), totals, strict=True):
            count = cdiv(self.first[row] % PAGE_SLOTS + total, PAGE_SLOTS)
            self.pages.append([self.free.pop() for _ in range(count)])
            self._write_table(row)

    def _move(self, by: int) -> None:
        by = cdiv(by, PAGE_SLOTS) * PAGE_SLOTS  # to the right by at least as many, to the left by at most
        self._set_length(self.cache.length + by)
        for row, first in enumerate(self.first):
            self._set_first(row, first + by)

    def _set_first(self, row: int, first: int) -> None:
        super()._set_first(row, first)
        self._write_table(row)

    def _write_table(self, row: int) -> None:
        table = self.cache.table
        assert table is not None
        before = self.first[row] // PAGE_SLOTS
        numbers = ([0] * before + self.pages[row])[: table.shape[1]]  # the rest is written when the rows have moved
        table[row] = on_device(numbers + [0] * (table.shape[1] - len(numbers)), table.device)


def most_pages(tokens: int) -> int:
    """Pages that tokens take wherever the first is in its page."""
    return cdiv(tokens - 1, PAGE_SLOTS) + 1
