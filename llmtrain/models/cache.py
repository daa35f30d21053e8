"""Caches of a HybridLM: the tokens read so far, kept so that the next one costs the work of one.

The rows of a batch end together: shorter ones are padded on the left, and `first` says where each begins. The next
free slot is kept in device memory, so reading one token is the same sequence of kernels every time, which a CUDA
graph can replay.

What each token has (keys, values) is kept in one piece per row, or in pages (Kwon et al., vLLM, arXiv:2309.06180): the slots of
a row are the same, and a table says in which page each PAGE_SLOTS of them are.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.models.context import BlockContext, Context
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.mixers.base import MixerCache
from llmtrain.models.mixers.replay import Replay, ReplayCache
from llmtrain.models.mixers.span import Span

PAGE_SLOTS = 32
"""In the memory of 16 requests of 4,096 tokens, 105 chats fit with 16, 102 with 32, 97 with 64 and 87 with 128 (prompts and answers
lognormal, medians of 200 and 150 tokens)."""


@dataclass
class LayerCache:
    """mixer: the cache of a layer's mixer, a ReplayCache if it has none of its own. shared: the cache of this use of a
    shared block, if there is one.
    """

    mixer: MixerCache
    shared: MixerCache | None = None

    @property
    def parts(self) -> list[MixerCache]:
        return [self.mixer] if self.shared is None else [self.mixer, self.shared]

    def map(self, change: Callable[[Tensor, int | None], Tensor]) -> LayerCache:
        return LayerCache(*(part.map(change) for part in self.parts))

    def take(self, rows: Tensor, capacity: int) -> LayerCache:
        return LayerCache(*(part.take(rows, capacity) for part in self.parts))

    def context(self, span: Span) -> BlockContext:
        mixer, shared = self.mixer.context(span), self.shared and self.shared.context(span)
        return BlockContext(None, shared, replay=mixer) if isinstance(mixer, Replay) else BlockContext(mixer, shared)

    @property
    def nbytes(self) -> int:
        return sum(part.nbytes for part in self.parts)


class Cache:
    """The memory of every layer for `batch` rows of up to `capacity` tokens, padding included.

    longest: tokens of a row, where there is room for more padding than for these; default: capacity. pages: number of pages,
    for which capacity is a multiple of PAGE_SLOTS; `table` [batch, capacity / PAGE_SLOTS] is the caller's, and at first of page 0
    alone. Tokens are read into pages one at a time, and rows of a cache without pages copied. Raises UserError when the model's
    learned positions end before `longest`.
    """

    def __init__(
        self, model: HybridLM, batch: int, capacity: int, longest: int | None = None, pages: int | None = None
    ):
        longest = longest or capacity
        if model.positions is not None and longest > model.config.max_seq_len:
            raise UserError(
                f"{longest} tokens asked for, but the model has learned positions for model.max_seq_len = "
                f"{model.config.max_seq_len}; shorten the prompt or ask for fewer new tokens"
            )
        device = next(model.parameters()).device  # a stage of a pipeline may have no embedding
        self.capacity, self.length = capacity, 0
        self.learned = model.config.max_seq_len if model.positions is not None else None
        self.next = torch.zeros(1, dtype=torch.int64, device=device)
        self.first = torch.zeros(batch, dtype=torch.int32, device=device)

        self.table: Tensor | None = None
        if pages is not None:
            assert capacity % PAGE_SLOTS == 0
            self.table = torch.zeros(batch, capacity // PAGE_SLOTS, dtype=torch.int32, device=device)
            capacity = PAGE_SLOTS

        def in_pages(tensor: Tensor, dim: int | None) -> Tensor:
            return tensor if pages is None or dim is None else tensor.new_zeros(pages, *tensor.shape[1:])

        self.layers: list[LayerCache] = []
        for mixer, shared in model.layer_mixers():
            own = mixer.empty_cache(batch, capacity, device)
            if own is None:
                own = ReplayCache(torch.zeros(batch, capacity, model.config.d_model, dtype=model.dtype, device=device))
            of_shared = shared and shared.empty_cache(batch, capacity, device)
            assert shared is None or of_shared is not None, "a shared block's mixer has a cache"
            self.layers.append(LayerCache(own, of_shared).map(in_pages))
        self._tensors = self._all_tensors()

    @property
    def nbytes(self) -> int:
        """Bytes of all layers' memory."""
        return sum(layer.nbytes for layer in self.layers)

    def rows(self, rows: slice) -> Cache:
        """A view of some rows' memory. What is read through it does not advance this cache: see `advance`."""
        view = copy.copy(self)
        view.next, view.first = self.next.clone(), self.first[rows]
        paged = self.table is not None
        view.table = None if self.table is None else self.table[rows]
        view.layers = [
            layer.map(lambda tensor, dim: tensor if paged and dim is not None else tensor[rows])
            for layer in self.layers
        ]
        view._tensors = view._all_tensors()
        return view

    def take(self, rows: Tensor, capacity: int) -> Cache:
        """A copy of some rows, which may repeat, with room for more tokens: one prefix, several ways to go on."""
        assert self.table is None
        copied = copy.copy(self)
        copied.capacity = capacity
        copied.next, copied.first = self.next.clone(), self.first[rows]
        copied.layers = [layer.take(rows, capacity) for layer in self.layers]
        copied._tensors = copied._all_tensors()
        return copied

    def tensors(self) -> list[tuple[Tensor, int | None]]:
        """Tensors of all layers, each with the dimension of its slots, None for a state; always the same, written in place."""
        return self._tensors

    def _all_tensors(self) -> list[tuple[Tensor, int | None]]:
        return [found for layer in self.layers for part in layer.parts for found in part.tensors()]

    def clear(self) -> None:
        """Forget what was read."""
        self.length = 0
        self.next.zero_()
        self.first.zero_()
        if self.table is not None:
            self.table.zero_()
        for tensor, dim in self.tensors():
            if dim is None:  # slots are overwritten before they are seen
                tensor.zero_()

    def copy_rows(
        self, rows: slice | Tensor, source: Cache, of: slice | Tensor, slots: slice, source_slots: slice
    ) -> None:
        """Overwrite rows by those of another cache of this model, or of this cache: their states, and their entries of these slots.
        of: rows of the source, each for one here. The source has no pages, or no slots are copied."""
        span = None
        if self.table is not None:
            held = torch.arange(slots.start, slots.stop, device=self.next.device)
            span = Span(held, self.first[rows], 0, False, self.table[rows])
        for (to, dim), (tensor, _) in zip(self.tensors(), source.tensors(), strict=True):
            if dim is None:
                to[rows] = tensor[of]
            elif span is None:
                _cut(to, dim, slots)[rows] = _cut(tensor, dim, source_slots)[of]
            elif len(span.slots):
                span.keep(to, dim, _cut(tensor, dim, source_slots)[of].movedim(dim, 1))

    def move(self, rows: slice, slots: slice, by: int) -> None:
        """Move some rows' entries of these slots by a number of slots. The caller sets `first`, `next` and `length`."""
        to = slice(slots.start + by, slots.stop + by)
        for tensor, dim in self.tensors():
            if dim is not None:
                _cut(tensor[rows], dim, to).copy_(_cut(tensor[rows], dim, slots).clone())  # they overlap

    def read(self, seq_len: int, padding: Tensor | None = None) -> Context:
        """The context of a forward pass that reads the next seq_len tokens on from this cache, into it; they count as read.

        padding: [batch], tokens at the left of each row to pass over (first call only). Raises UserError when the tokens
        do not fit.
        """
        if self.length + seq_len > self.capacity:
            raise UserError(f"the cache holds {self.capacity} tokens; {self.length} + {seq_len} do not fit")
        if padding is not None:
            assert self.length == 0, "only the first tokens can be padded"
            self.first.copy_(padding)
        slots = self.next + torch.arange(seq_len, device=self.next.device)
        assert self.table is None or seq_len == 1, "tokens are read into pages one at a time"
        span = Span(slots, self.first, self.length, padding is not None, self.table)
        self.advance(seq_len)
        positions = None if self.learned is None else span.positions.clamp(0, self.learned - 1)
        return Context([layer.context(span) for layer in self.layers], positions)

    def advance(self, tokens: int) -> None:
        """Every row has read this many tokens."""
        self.next += tokens
        self.length += tokens


def _cut(tensor: Tensor, dim: int, slots: slice) -> Tensor:
    return tensor.narrow(dim, slots.start, slots.stop - slots.start)
