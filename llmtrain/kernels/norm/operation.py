"""The residual norm as tests, doctor, bench and tuning see it: x + delta and its norm, as it stands in every block."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.operation import Draw, Operation, Shape, Work


class Norm(Operation):
    name, spec, leaves, public = "norm", NormSpec, ("x", "delta", "weight", "bias"), ("reference",)
    outputs = ("sum", "y")

    def inputs(
        self, spec: NormSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, summed: bool = True
    ) -> tuple[list[Any], tuple[Tensor, Tensor]]:
        """x, delta [batch, T, dim] (None unless `summed`), whose means are not zero, as those of a residual stream, weight and bias
        [dim], None without."""
        draw, size = Draw(device, spec.dtype, seed), (batch, seq_len, spec.dim)
        x, delta = ((0.3 + draw.wide(*size)).to(draw.dtype) for _ in range(2))
        up = draw(*size), draw(*size)
        weight, bias = (1 + 0.5 * draw.wide(spec.dim)).to(draw.dtype), draw(spec.dim)
        return [x, delta if summed else None, weight, bias if spec.bias else None], up

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: of x, delta, their sum and y; of dy, the sum, its gradient, and dx. Without delta of x and y; of dy, x and dx."""
        moved = shape.batch * shape.seq_len * shape.spec.dim * base.element_size(shape.spec.dtype)
        forward, backward = (4, 4) if self.option(shape, "summed", True) else (2, 3)
        return Work(0.0, forward * moved), Work(0.0, backward * moved)

    def label(self, shape: Shape) -> str:
        return f"{shape.spec.type} {shape.spec.dim}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        """2560: no power of two, as Zamba2-2.7B's and Mamba-2 2.7B's. Tokens are all that counts."""
        for dim in (16,) if tiny else (2048, 2560, 4096):
            for spec in (NormSpec(dim), NormSpec(dim, "layernorm", True)):
                yield Shape(replace(spec, dtype="float32"), 1, 256) if tiny else Shape(spec, 4, 4096)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        """Few tokens: on a CPU, PyTorch adds up LayerNorm's gradients of weights in bf16."""
        yield "sum, RMSNorm", Shape(NormSpec(256, dtype=dtype), base.SELFTEST_BATCH, 24)
        yield "sum, LayerNorm", Shape(NormSpec(256, "layernorm", True, dtype=dtype), base.SELFTEST_BATCH, 24)

    def sized(
        self, dim: int = 2560, centred: bool = False, biased: bool = False, summed: bool = True, dtype: str = "bfloat16",
        tokens: int = base.TOKENS,
    ) -> Shape:  # fmt: skip
        spec = NormSpec(dim, "layernorm" if centred else "rmsnorm", bool(biased), 1e-5, dtype)
        return Shape(spec, 1, tokens, None, (("summed", bool(summed)),))


OPERATION = Norm()
