"""Base of the memory-bound problems: kernels that are searched on their own and rated by the bytes they move."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.operations import TOLERANCE, Attempt, Winner, relative_error
from llmtrain.kernels.platform import Platform

Outputs = tuple[Tensor, ...]


class MemoryBound(abc.ABC):
    """See operations.Problem. parts: kernels of `operation`; its rows are OPERATION.PART, or OPERATION if it has one part."""

    operation: str
    parts: Sequence[str]
    launch: type
    """Dataclass of one part's launch parameters."""
    _exact: dict[str, Outputs] | None = None

    def __init__(self, case: Any, where: Platform):
        self.case, self.where, self.tolerance = case, where, TOLERANCE[case.dtype]

    @abc.abstractmethod
    def launches(self, part: str, quick: bool) -> Iterator[Any]:
        """Candidates: the table's launch first, then others; fitted to this problem, so some may be equal."""

    @abc.abstractmethod
    def run(self, part: str, launch: Any) -> Outputs:
        """Run a part by `launch` (None: the table's)."""

    @abc.abstractmethod
    def in_float64(self) -> dict[str, Outputs]:
        """Exact results of every part."""

    @abc.abstractmethod
    def bytes(self, part: str) -> int:
        """Bytes that a part must read and write, each once."""

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        return [asdict(launch) for launch in dict.fromkeys(self.launches(part, quick))]

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], Outputs]:
        chosen = None if launch is None else self.launch(**launch)
        return lambda: self.run(part, chosen)

    def error(self, part: str, launch: dict[str, Any]) -> float:
        if self._exact is None:
            self._exact = self.in_float64()
        found = self.runner(part, launch)()
        return max(relative_error(a, b) for a, b in zip(found, self._exact[part], strict=True))

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        found = []
        for part, attempts in best.items():
            if attempts:
                one, kernel = attempts[0], self.operation if len(self.parts) == 1 else f"{self.operation}.{part}"
                found.append(Winner(kernel, self.launch(**one.launch), one.ms, one.shared, self.bytes(part), "gbps"))
        return found


class Draw:
    """Random tensors, the same every time; without memory on the device `meta`."""

    def __init__(self, device: str, dtype: str):
        self.device, self.dtype = device, getattr(torch, dtype)
        self._generator = None if device == "meta" else torch.Generator(device).manual_seed(0)

    def __call__(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator, device=self.device).to(self.dtype)

    def slice(self, *shape: int) -> Tensor:
        """Slice of a projection more than twice as wide, as a mixer's parts are; rows start at multiples of 16 bytes."""
        *leading, width = shape
        return self(*leading, 2 * width + 128)[..., width - width % 8 : -128 - width % 8]
