"""How much memory an operation takes at its peak, without a GPU: tensors on the device `meta`, kernels not launched."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import JITFunction


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made inside that live now, and of those that lived at once at most."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        found = func(*args, **(kwargs or {}))
        for t in tree_leaves(found):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in given | self._known:
                self._count(t.untyped_storage())
        return found

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        self._known.add(key)
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.now -= size


@contextmanager
def no_launches() -> Iterator[None]:
    launch = JITFunction.run
    JITFunction.run = lambda self, *args, **options: None
    try:
        yield
    finally:
        JITFunction.run = launch


def peak_mib(run: Callable[[], Any]) -> float:
    """Of all that `run` makes, until it returns; what it is given does not count."""
    with no_launches(), LiveBytes() as live:
        run()
    return live.peak / 2**20
