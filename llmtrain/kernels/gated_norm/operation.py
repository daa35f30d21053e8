"""The gated norm as tests, doctor, bench and tuning see it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.operation import Draw, Operation, Shape, Work


class GatedNorm(Operation):
    name, spec, leaves, public = "gated_norm", GatedNormSpec, ("x", "z", "weight"), ("mamba_ssm",)

    def inputs(
        self, spec: GatedNormSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0
    ) -> tuple[list[Any], Tensor]:
        """x, z [batch, T, dim], z a slice of a wider projection, and weight [dim]."""
        draw, size = Draw(device, spec.dtype, seed), (batch, seq_len, spec.dim)
        x, z, weight = draw(*size), draw.slice(*size), (1 + 0.5 * draw.wide(spec.dim)).to(draw.dtype)
        return [x, z, weight], draw(*size)

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: of x, z and y; of dy, x, z, dx and dz."""
        numbers = shape.batch * shape.seq_len * shape.spec.dim
        moved, flops = numbers * base.element_size(shape.spec.dtype), 8.0 * numbers
        return Work(flops, 3 * moved), Work(2 * flops, 5 * moved)

    def label(self, shape: Shape) -> str:
        return f"{shape.spec.dim} channels"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        """Tokens are all that counts."""
        yield (
            Shape(GatedNormSpec(32, 1, 1e-5, False, "float32"), 2, 128)
            if tiny
            else Shape(GatedNormSpec(5120, 1, 1e-5), 4, 4096)
        )

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "gate first", Shape(GatedNormSpec(256, 1, 1e-5, False, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def sized(
        self, group_size: int = 5120, groups: int = 1, norm_first: bool = False, dtype: str = "bfloat16",
        tokens: int = base.TOKENS,
    ) -> Shape:  # fmt: skip
        return Shape(GatedNormSpec(group_size * groups, groups, 1e-5, bool(norm_first), dtype), 1, tokens)


OPERATION = GatedNorm()
