"""Rotary positions as tests, doctor, bench and tuning see them: queries and keys as slices of one projection."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.operation import Draw, Function, Operation, Shape, Work
from llmtrain.kernels.rotary.spec import RotarySpec


class Rotary(Operation):
    name, spec, leaves, outputs, public = "rotary", RotarySpec, ("q", "k"), ("out",), ("reference",)

    def heads(self, spec: RotarySpec, heads: int | None = None, kv_heads: int | None = None) -> tuple[int, int]:
        """Heads of queries and of keys; None: as many as make up about 2048 channels."""
        heads = heads or max(1, 2048 // spec.head_dim)
        return heads, kv_heads or heads

    def inputs(
        self, spec: RotarySpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, heads: int | None = None,
        kv_heads: int | None = None,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """q and k [batch, T, heads, head_dim], slices of a projection; the gradient of both side by side."""
        draw, counts = Draw(device, spec.dtype, seed), self.heads(spec, heads, kv_heads)
        q, k = (draw.slice(batch, seq_len, n * spec.head_dim).unflatten(-1, (n, spec.head_dim)) for n in counts)
        return [q, k], draw(batch, seq_len, sum(counts), spec.head_dim)

    def tables(self, spec: RotarySpec, *leading: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
        """Cosines and sines [*leading, 1, head_dim / 2] in fp32; leading: T, or with the batch in front."""
        rates = 10000.0 ** -torch.linspace(0, 1, spec.head_dim // 2, device=device)
        angle = torch.arange(leading[-1], device=device)[:, None, None] * rates
        if len(leading) > 1:  # rows that begin elsewhere
            angle = angle + 100 * torch.arange(leading[0], device=device)[:, None, None, None] * rates
        return angle.cos(), angle.sin()

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        return self.joined(kernel, *self.tables(shape.spec, shape.seq_len, device=device))

    def joined(self, kernel: Any, cos: Tensor, sin: Tensor) -> Function:
        """One output, for the gradient of both; the concatenation is PyTorch's and the same for all. In float64 with tables as
        wide."""

        def run(q: Tensor, k: Tensor) -> Tensor:
            turned = kernel(q, k, *(t.double() if q.dtype == torch.float64 else t for t in (cos, sin)))
            return torch.cat(turned, dim=2)

        return run

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: q and k, in and out; the joined output is written and read once more."""
        spec = shape.spec
        numbers = shape.batch * shape.seq_len * sum(self.heads(spec, **dict(shape.options))) * spec.head_dim
        work = Work(3.0 * numbers, 4 * numbers * base.element_size(spec.dtype))
        return work, work

    def label(self, shape: Shape) -> str:
        heads, _ = self.heads(shape.spec, **dict(shape.options))
        return f"{heads}x{shape.spec.head_dim}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(RotarySpec(16, "float32"), 2, 128, None, (("heads", 2),))
            return
        for head_dim in (64, 128):
            yield Shape(RotarySpec(head_dim), 4, 4096)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        options = (("heads", 4), ("kv_heads", 2))
        yield "positions", Shape(RotarySpec(64, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN, None, options)

    def sized(
        self, head_dim: int = 128, heads: int | None = None, kv_heads: int | None = None, seq_len: int = 4096,
        dtype: str = "bfloat16", tokens: int = base.TOKENS,
    ) -> Shape:  # fmt: skip
        options = (("heads", heads), ("kv_heads", kv_heads))
        return Shape(RotarySpec(head_dim, dtype), max(1, tokens // seq_len), seq_len, None, options)

    def refusal(self, shape: Shape) -> str | None:
        if shape.spec.head_dim % 2:
            return f"rotary positions turn channels in pairs: head_dim must be even, not {shape.spec.head_dim}"
        return None


OPERATION = Rotary()
