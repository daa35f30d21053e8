"""Cells of `llmtrain bench kernels`: one operation at one shape, by several contenders on the same tensors."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from llmtrain.bench.kernels import peers
from llmtrain.bench.kernels.peers import OURS, Contender
from llmtrain.kernels import operation as operations
from llmtrain.kernels.operation import Operation, Output, Shape, Work

Direction = Literal["forward", "backward", "sum", "memory"]


@dataclass(frozen=True)
class Bar:
    """Requirement on our kernel: `at_least` times as fast as `against` (a contender, or several by their first word: the best of
    those); for memory, at most 1 / at_least of its peak.
    """

    against: str
    what: Direction
    at_least: float


PLAIN_ATTENTION = (Bar("sdpa:flash", "sum", 1.4), Bar("flex", "sum", 1.05), Bar("sdpa:flash", "memory", 1.0))
BARS: dict[str, tuple[Bar, ...]] = {
    "attention": (Bar("flex", "sum", 1.2), Bar("flex", "memory", 1.0)),
    "ssd": (
        Bar("mamba_ssm", "sum", 2.0),
        Bar("mamba_ssm", "forward", 1.8),
        Bar("mamba_ssm", "backward", 2.0),
        Bar("mamba_ssm", "memory", 1.0),
    ),
    "gated_delta": (Bar("fla", "sum", 1.0),),
    "kimi_delta": (Bar("fla", "sum", 1.2),),
    "mamba3": (Bar("mamba_ssm", "sum", 1.2),),
    "mamba_mixer": (Bar("public", "sum", 2.0), Bar("public", "memory", 1.0)),
}


@dataclass
class Cell:
    """inputs: of a seed, leaves (None: left out) and the gradient of the output (of several: gradients), made when it is this
    cell's turn.

    exact: (leaves, gradient) -> output and gradients of the leaves in float64, or pieces of them; pieces: those of a
    contender's outcome, in the same order; names: theirs. draws: times as many draws of the inputs as elsewhere, where
    an output has so few numbers that its error differs much from draw to draw.
    """

    operation: str
    name: str
    seq_len: int
    names: tuple[str, ...]
    inputs: Callable[[int], tuple[list[Any], Any]]
    contenders: Callable[[], list[Contender]]
    exact: Callable[[list[Any], Any], Sequence[Tensor]]
    forward: Work
    backward: Work
    bars: tuple[Bar, ...] = ()
    pieces: Callable[[Sequence[Tensor]], Sequence[Tensor]] = lambda found: found
    draws: int = 1

    @property
    def label(self) -> str:
        return f"{self.operation} {self.name} T={self.seq_len}"


def cells(tiny: bool, chunks: tuple[int, ...], titles: Sequence[str]) -> Iterator[Cell]:
    """Cells of the operations that are wanted. chunks: of public scans; tiny: for a CPU, without bars."""
    for one in operations.operations():
        if one.title in titles:
            for shape in one.shapes(tiny):
                plain = one.name == "attention" and shape.variant == "plain" and shape.spec.head_dim <= 128
                bars = () if tiny else PLAIN_ATTENTION if plain else BARS.get(one.name, ())
                yield cell(one, shape, chunks, bars)


def cell(
    one: Operation,
    shape: Shape,
    chunks: tuple[int, ...] = (),
    bars: tuple[Bar, ...] = (),
    backends: Sequence[str] | None = None,
) -> Cell:
    """backends: None: all that serve and are worth measuring, and peers."""

    def inputs(seed: int) -> tuple[list[Any], Any]:
        tensors, up = one.draw(shape, device(), seed)
        return operations.leaves(tensors), up

    names = one.names(one.draw(shape, "meta")[0])
    return Cell(
        one.title, one.label(shape), shape.seq_len, names, inputs,
        lambda: peers.contenders(one, shape, device(), chunks, backends), lambda tensors, up: one.exact(shape, tensors, up),
        *one.work(shape), bars, lambda found: one.pieces(shape, found), one.draws,
    )  # fmt: skip


def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


__all__ = ["OURS", "Bar", "Cell", "Contender", "Output", "Work", "cell", "cells", "device"]
