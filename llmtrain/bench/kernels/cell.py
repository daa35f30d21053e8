"""Cells of `llmtrain bench kernels`: one operation at one shape, by several contenders on the same tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

Direction = Literal["forward", "backward", "sum", "memory"]
Output = Tensor | tuple[Tensor, ...]
OURS = "triton"


@dataclass(frozen=True)
class Bar:
    """Requirement on our kernel: `at_least` times as fast as `against` (a contender, or several by their first word: the best of
    those); for memory, at most 1 / at_least of its peak.
    """

    against: str
    what: Direction
    at_least: float


@dataclass(frozen=True)
class Contender:
    """public: its speed is what ours is compared with. make: builds the function of the cell's leaves that gives the output;
    called once, on the machine. warm: (k, n) -> compiles the k-th of n parts of what a public autotuner would compile
    one by one, where there is such a thing.
    """

    name: str
    make: Callable[[], Callable[..., Output]]
    public: bool = False
    warm: Callable[[int, int], None] | None = None


@dataclass
class Work:
    """Work of one direction: FLOP of matrix products, and the bytes that a perfect kernel moves."""

    flops: float
    bytes: float


@dataclass
class Cell:
    """inputs: of a seed, leaves and the gradient of the output (of several: gradients), made when it is this cell's turn.

    exact: (leaves, gradient) -> output and gradients of the leaves in float64, or pieces of them; pieces: those of a
    contender's outcome, in the same order; names: theirs. draws: times as many draws of the inputs as elsewhere, where
    an output has so few numbers that its error differs much from draw to draw.
    """

    operation: str
    name: str
    seq_len: int
    names: tuple[str, ...]
    inputs: Callable[[int], tuple[list[Tensor], Any]]
    contenders: Callable[[], list[Contender]]
    exact: Callable[[list[Tensor], Any], Sequence[Tensor]]
    forward: Work
    backward: Work
    bars: tuple[Bar, ...] = ()
    pieces: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda found: found
    draws: int = 1

    @property
    def label(self) -> str:
        return f"{self.operation} {self.name} T={self.seq_len}"


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def run_both(function: Callable[..., Output], leaves: list[Tensor], up: Output) -> tuple[Tensor, ...]:
    """Output, or outputs, and gradients."""
    y = function(*leaves)
    outputs = y if isinstance(y, tuple) else (y,)
    return (*(t.detach() for t in outputs), *torch.autograd.grad(y, leaves, up))


def leaf(t: Tensor) -> Tensor:
    return t.detach().requires_grad_()


def wide(leaves: Sequence[Tensor], cut: Callable[[Tensor], Tensor] = lambda t: t) -> list[Tensor]:
    return [cut(t.detach()).double().requires_grad_() for t in leaves]


def generator(seed: int) -> torch.Generator:
    return torch.Generator(device()).manual_seed(seed)


def draw(g: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=g, device=device()).to(dtype)
