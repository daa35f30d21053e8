"""Inputs of recomputed layers, which checkpointing keeps for the backward pass, in host memory (activation_checkpointing.offload).

Copies run on a stream of their own, beside computation: to the host while later layers run, and back one layer ahead.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class HostInputs:
    """Inputs of a model's layers, kept between their forward and their backward pass."""

    def __init__(self) -> None:
        self._last: weakref.ref[_Kept] | None = None
        self._stream: torch.cuda.Stream | None = None

    def keep(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A layer's forward, recomputed in the backward pass, whose first argument is kept in host memory meanwhile."""

        @functools.wraps(forward)
        def offloaded(x: Tensor, *args: Any, **kwargs: Any) -> Any:
            with saved_tensors_hooks(functools.partial(self._pack, x), self._unpack):
                return forward(x, *args, **kwargs)

        return offloaded

    def _pack(self, x: Tensor, saved: Tensor) -> Tensor | _Kept:
        """Called for all that autograd saves within the layer: weights and small tensors stay where they are."""
        if saved.data_ptr() != x.data_ptr() or (saved.shape, saved.dtype) != (x.shape, x.dtype):
            return saved
        if saved.is_cuda and self._stream is None:
            self._stream = torch.cuda.Stream()
        kept = _Kept(saved, self._stream, self._last)
        self._last = weakref.ref(kept)
        return kept

    def _unpack(self, saved: Tensor | _Kept) -> Tensor:
        if not isinstance(saved, _Kept):
            return saved
        self._last = saved.before  # what is kept from here on follows on what was kept before
        x = saved.get()
        if (before := saved.before and saved.before()) is not None:
            before.load()
        return x


class _Kept:
    """One tensor in host memory. before: the one that was kept before it, which the backward pass wants next."""

    def __init__(self, x: Tensor, stream: torch.cuda.Stream | None, before: weakref.ref[_Kept] | None):
        self.device, self.stream, self.before = x.device, stream, before
        self.loaded: Tensor | None = None
        if stream is None:
            self.host = x.detach().to("cpu", copy=True)
            return
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
            self.host.copy_(x.detach(), non_blocking=True)
        x.record_stream(stream)

    def load(self) -> None:
        """Begin to bring it back, after what the stream has copied so far."""
        if self.loaded is None and self.stream is not None:
            with torch.cuda.stream(self.stream):
                self.loaded = self.host.to(self.device, non_blocking=True)

    def get(self) -> Tensor:
        """The tensor on its device, once more; it is not kept there."""
        if self.stream is None:
            return self.host.to(self.device)
        self.load()
        x, self.loaded = self.loaded, None
        assert x is not None
        current = torch.cuda.current_stream()
        current.wait_stream(self.stream)
        x.record_stream(current)
        return x
