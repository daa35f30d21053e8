"""Search of launch parameters: what a search of one operation at one shape offers. The search itself is bench/tune."""

import abc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import Tensor

from llmtrain.kernels.operation import Operation, Shape, relative_error
from llmtrain.kernels.platform import Platform

Outputs = tuple[Tensor, ...]


@dataclass
class Attempt:
    """A launch of one part, as plain data, and what came of it. problem: why it is out of the race."""

    part: str
    launch: dict[str, Any]
    shared: int = 0
    problem: str | None = None
    ms: float = float("inf")
    error: float = float("nan")


@dataclass
class Winner:
    """Future row of a table. work: FLOP or bytes of one call; unit: tflops or gbps."""

    kernel: str
    launch: Any
    ms: float
    shared: int
    work: float
    unit: str


class Search(abc.ABC):
    """One operation at one shape. On the device `meta` it has no memory, and its runners only compile.

    parts: kernels, or groups of them, that are searched separately. launch: dataclass of one part's parameters. tolerance: the
    largest relative error that counts as right. spec: of the shape. by_pieces: `Operation.pieces` of results are compared.
    """

    parts: Sequence[str] = ("forward", "backward")
    launch: type
    unit = "gbps"
    by_pieces = False

    def __init__(self, operation: Operation, shape: Shape, device: str, where: Platform):
        self.operation: Any = operation
        self.shape, self.spec, self.device, self.where = shape, shape.spec, device, where
        self.tensors, self.up = operation.draw(shape, device)
        self.tolerance = operation.tolerance(shape.spec.dtype)
        self._exact: dict[str, Sequence[Tensor]] = {}

    @abc.abstractmethod
    def launches(self, part: str, quick: bool) -> Iterator[Any]:
        """Candidates: the table's launch first, then others; fitted to this shape, so some may be equal."""

    @abc.abstractmethod
    def run(self, part: str, launch: Any) -> Sequence[Tensor]:
        """Run a part by `launch` (None: the table's)."""

    @abc.abstractmethod
    def in_float64(self) -> dict[str, Sequence[Tensor]]:
        """Exact results of every part."""

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        """Launches that may fit, the table's first, as plain data."""
        return [asdict(launch) for launch in dict.fromkeys(self.launches(part, quick))]

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], Any]:
        """Runs one part by `launch` (None: the table's)."""
        chosen = None if launch is None else self.launch(**launch)
        return lambda: self.run(part, chosen)

    def error(self, part: str, launch: dict[str, Any]) -> float:
        """Largest relative error of what a part gives, against float64."""
        if not self._exact:
            self._exact = self.in_float64()
        found = self.runner(part, launch)()
        found = self.operation.pieces(self.shape, found) if self.by_pieces else found
        return max(relative_error(a, b) for a, b in zip(found, self._exact[part], strict=True))

    def work(self, part: str) -> float:
        """Bytes that a part must read and write, each once, or its FLOP."""
        forward, backward = self.operation.work(self.shape)
        return forward.bytes if part == "forward" else backward.bytes

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        """The rows to write, from the attempts of every part, the fastest first. Without memory too: measurer (part,
        launch -> measuring.Measured) runs what else must be run."""
        name, found = self.operation.name, []
        for part, attempts in best.items():
            if attempts:
                one, kernel = attempts[0], name if len(self.parts) == 1 else f"{name}.{part}"
                found.append(Winner(kernel, self.launch(**one.launch), one.ms, one.shared, self.work(part), self.unit))
        return found


def lanes(where: Platform) -> int:
    """Threads of a warp."""
    return 64 if where.vendor == "amd" else 32
