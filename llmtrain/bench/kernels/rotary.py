"""The cells of rotary positions: queries and keys as slices of one projection."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from llmtrain.bench.kernels import scan
from llmtrain.bench.kernels.backends import all_backends
from llmtrain.bench.kernels.cell import Cell, Work, device, draw, generator, leaf, run_both, wide
from llmtrain.kernels.rotary.reference import ReferenceRotary
from llmtrain.kernels.rotary.spec import RotarySpec


def cells(tiny: bool) -> Iterator[Cell]:
    for head_dim in (16,) if tiny else (64, 128):
        yield cell(head_dim, 128 if tiny else scan.LENGTHS[1], 2 if tiny else 2048 // head_dim, 256 if tiny else 16384)


def cell(head_dim: int, seq_len: int, heads: int, tokens: int) -> Cell:
    dtype = torch.bfloat16 if device() == "cuda" else torch.float32
    angle = torch.arange(seq_len, device=device())[:, None, None] / 10000 ** torch.linspace(
        0, 1, head_dim // 2, device=device()
    )
    cos, sin = angle.cos(), angle.sin()

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        g = generator(seed)
        fused = draw(g, tokens // seq_len, seq_len, 3 * heads * head_dim, dtype=dtype)
        q, k, _ = (t.unflatten(-1, (heads, head_dim)) for t in fused.chunk(3, dim=-1))
        return [leaf(q), leaf(k)], draw(g, *q.shape[:2], 2 * heads, head_dim, dtype=dtype)

    def joined(kernel: Callable[..., tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor) -> Callable[..., Tensor]:
        """One output, for the gradient of both; the concatenation is PyTorch's and the same for all."""
        return lambda q, k: torch.cat(kernel(q, k, cos, sin), dim=2)

    def exact(leaves: list[Tensor], up: Tensor) -> tuple[Tensor, ...]:
        return run_both(joined(ReferenceRotary(), cos.double(), sin.double()), wide(leaves), up.double())

    spec = RotarySpec(head_dim, str(dtype).removeprefix("torch."))
    numbers = 2 * tokens * heads * head_dim
    # The joined output is written and read once more.
    work = Work(3.0 * numbers, 4 * numbers * dtype.itemsize)
    return Cell(
        "rotary", f"{heads}x{head_dim}", seq_len, ("out", "dq", "dk"), inputs,
        lambda: all_backends("rotary", spec, ("reference",), lambda kernel: joined(kernel, cos, sin)), exact, work, work,
    )  # fmt: skip
