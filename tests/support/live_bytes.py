"""Launches of an operation, and its peak of memory, without a GPU.

Tensors are on the device `meta`, and Triton's kernels are not launched.
"""

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


class _Operators(TorchDispatchMode):
    """Names those that would launch a kernel: all but views and what makes room."""

    def __init__(self, found: list[str]) -> None:
        super().__init__()
        self.found = found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.found.append(func.name())
        return func(*args, **(kwargs or {}))


@contextmanager
def launches() -> Iterator[list[str]]:
    """Launches inside the context, in order: Triton's kernels as folder.name, which do not run, and PyTorch's operators."""
    launch, found = JITFunction.run, []

    def run(self: Any, *args: Any, **options: Any) -> None:
        folder = self.fn.__module__.removeprefix("llmtrain.kernels.").split(".")[0]
        found.append(f"{folder}.{self.fn.__name__}")

    JITFunction.run = run
    try:
        with _Operators(found):
            yield found
    finally:
        JITFunction.run = launch


def peak_mib(run: Callable[[], Any]) -> float:
    """Peak of all tensors that `run` makes, until it returns; what it is given does not count."""
    with launches(), LiveBytes() as live:
        run()
    return live.peak / 2**20
