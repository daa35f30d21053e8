"""Interface of an operation to the search: one file per operation, with a class that is a Problem."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform

OPERATIONS = ("attention", "ssd", "conv1d", "gated_norm", "norm", "rotary")
TOLERANCE = {"bfloat16": 0.01, "float16": 0.002, "float32": 1e-4}


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


class Problem(Protocol):
    """One operation at one shape. On the device `meta` it has no memory, and its runners only compile."""

    case: Any
    """The operation's Case: its sizes, its dtype, and refusal(): why no search can serve it on any GPU, or None."""
    parts: Sequence[str]
    """Kernels, or groups of them, that are searched separately."""
    tolerance: float
    """The largest relative error that counts as right."""

    def candidates(self, part: str, quick: bool) -> list[dict[str, Any]]:
        """Launches that may fit, the table's first."""
        ...

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], Any]:
        """Runs one part by `launch` (None: the table's)."""
        ...

    def error(self, part: str, launch: dict[str, Any]) -> float:
        """Largest relative error of what it gives, against float64."""
        ...

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        """The rows to write, from the attempts of every part, the fastest first. Without memory too: measurer (part,
        launch -> measuring.Measured) runs what else must be run.
        """
        ...


def make_case(operation: str, fields: dict[str, Any]) -> Any:
    """The Case of `operation` (or of a module, by its dotted name).

    Raises UserError for an operation that is not there and for a field that its cases do not have.
    """
    case = _module(operation).Case
    for name in fields.keys() - case.__dataclass_fields__.keys():
        sizes = [known for known in case.__dataclass_fields__ if known not in ("dtype", "variant")]
        raise UserError(f"{operation} has no '{name}'; its cases have {', '.join(sizes)}")
    return case(**fields)


def problem(operation: str, case: dict[str, Any], device: str, where: Platform) -> Any:
    """The Problem of `operation` whose Case has the fields `case`. Raises UserError as make_case does."""
    return _module(operation).Problem(make_case(operation, case), device, where)


def _module(operation: str) -> Any:
    if operation not in OPERATIONS and "." not in operation:
        raise UserError(f"nothing to tune in '{operation}'; there is {', '.join(OPERATIONS)}")
    return importlib.import_module(operation if "." in operation else f"llmtrain.bench.tune.{operation}")


def relative_error(found: Tensor, exact: Tensor) -> float:
    """Relative error in the norm of a whole tensor."""
    return float((found.double() - exact.double()).norm() / exact.double().norm().clamp_min(1e-30))
