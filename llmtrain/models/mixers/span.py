"""The tokens that a model reads on from a cache in one call, as every layer sees them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

T_ = TypeVar("T_")


@dataclass
class Span:
    """The tokens being read: what their layers share.

    slots: [T], where they go in the cache. first: [batch], each row's first slot that is not padding.
    start: tokens read before. padded: whether some of the tokens are padding, which only the first span has.
    pages: [batch, n], the numbers of each row's pages, in order, where what tokens have is kept in pages (Cache).
    """

    slots: Tensor
    first: Tensor
    start: int
    padded: bool
    pages: Tensor | None = None
    _made: dict[Any, Any] = field(default_factory=dict)

    def memoize(self, key: Any, make: Callable[[], T_]) -> T_:
        """make(), or what it made for an earlier layer."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def keep(self, entries: Tensor, dim: int, values: Tensor) -> None:
        """Write what the tokens have into the memory of a cache. entries: a tensor whose slots are along dim; values: [batch, T,
        …], the rest as in entries."""
        if self.pages is None:
            entries.index_copy_(dim, self.slots, values.movedim(1, dim))
        else:
            page, slot = self.memoize("pages", partial(self._in_pages, self.pages, entries.shape[dim]))
            entries.movedim(dim, 1)[page, slot] = values

    def _in_pages(self, pages: Tensor, size: int) -> tuple[Tensor, Tensor]:
        """[batch, T] each: the page of a token, and its slot there, as indexing takes them: others are converted in each layer."""
        page = pages[:, self.slots // size].long()
        return page, (self.slots % size).expand_as(page).contiguous()

    @property
    def positions(self) -> Tensor:
        """[batch, T]: place in the row's own text; negative on padding."""
        return self.memoize("positions", lambda: self.slots - self.first[:, None])

    def without_padding(self, x: Tensor) -> Tensor:
        """Zeros where there is padding. x: [batch, T, ...]."""
        if not self.padded:
            return x
        return x.masked_fill((self.positions < 0).view(*x.shape[:2], *[1] * (x.dim() - 2)), 0)

    def to_front(self, x: Tensor) -> Tensor:
        """Each row's padding moved behind its tokens, where causal attention does not see it. x: [batch, T, ...]."""
        return self._rolled(x, 1)

    def to_back(self, x: Tensor) -> Tensor:
        """The inverse of to_front."""
        return self._rolled(x, -1)

    def _rolled(self, x: Tensor, sign: int) -> Tensor:
        if not self.padded:
            return x

        def source() -> tuple[Tensor, Tensor]:
            rows = torch.arange(x.shape[0], device=x.device)[:, None]
            return rows, (self.slots + sign * self.first[:, None]) % x.shape[1]

        return x[self.memoize(("rolled", sign), source)]
