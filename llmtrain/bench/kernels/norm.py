"""The cells of the residual norm: x + delta and its norm, as it stands in every block."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from llmtrain.bench.kernels.backends import all_backends
from llmtrain.bench.kernels.cell import Cell, Work, device, draw, generator, leaf, run_both, wide
from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.norm.spec import NormSpec


def cells(tiny: bool) -> Iterator[Cell]:
    """2560: no power of two, as Zamba2-2.7B's and Mamba-2 2.7B's."""
    for dim in (16,) if tiny else (2048, 2560, 4096):
        yield cell(dim, "rmsnorm", False, 256 if tiny else 16384)
        yield cell(dim, "layernorm", True, 256 if tiny else 16384)


def cell(dim: int, kind: Literal["rmsnorm", "layernorm"], biased: bool, tokens: int) -> Cell:
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    spec = NormSpec(dim, kind, biased, dtype=str(dtype).removeprefix("torch."))
    names = ("sum", "y", "dx", "ddelta", "dweight", *["dbias"] * biased)
    seq_len = min(tokens, 4096)  # tokens are all that counts

    def inputs(seed: int) -> tuple[list[Tensor], tuple[Tensor, ...]]:
        g = generator(seed)
        x, delta, *up = (draw(g, tokens // seq_len, seq_len, dim, dtype=dtype) for _ in range(4))
        weights = [draw(g, dim, dtype=dtype) for _ in range(1 + biased)]
        return [leaf(t) for t in (x, delta, *weights)], tuple(up)

    def exact(leaves: list[Tensor], up: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return run_both(ReferenceNorm(spec), wide(leaves), tuple(t.double() for t in up))

    work = Work(0.0, 4 * tokens * dim * dtype.itemsize)
    return Cell(
        "norm", f"{kind} {dim}", seq_len, names, inputs,
        lambda: all_backends("norm", spec, ("reference",)), exact, work, work,
    )  # fmt: skip
