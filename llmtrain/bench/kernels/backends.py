"""Backends of the registry as contenders of a cell."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from llmtrain.bench.kernels.cell import Contender
from llmtrain.kernels import platform, registry
from llmtrain.kernels.registry import Operation


def backends(operation: Operation, spec: Any) -> list[str]:
    """Names of the operation's backends that can serve `spec` on this machine."""
    return [row.backend for row in registry.table(operation, spec, platform.detect()) if row.reason is None]


def built(operation: Operation, name: str, spec: Any, wrap: Callable[[Any], Any] = lambda kernel: kernel) -> Any:
    """`wrap` of the kernel as the model runs it: PyTorch backends are compiled, on a GPU."""
    here = platform.detect()
    function = wrap(registry.resolve(operation, name, spec, here).build(spec, here))
    compiled = here.vendor != "cpu" and name in ("reference", "aten")
    return torch.compile(function, dynamic=False) if compiled else function


def all_backends(
    operation: Operation, spec: Any, public: tuple[str, ...], wrap: Callable[[Any], Any] = lambda kernel: kernel
) -> list[Contender]:
    """A contender for each backend that can serve `spec` on this machine. public: the names of those that are not ours."""
    names = backends(operation, spec)
    return [Contender(name, lambda name=name: built(operation, name, spec, wrap), name in public) for name in names]
