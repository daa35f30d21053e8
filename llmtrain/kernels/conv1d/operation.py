"""The short causal convolution with SiLU as tests, doctor, bench and tuning see it."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.operation import DOCUMENT, Draw, Function, Operation, Shape, Work


class Conv1d(Operation):
    name, spec, leaves, public = "conv1d", Conv1dSpec, ("x", "weight", "bias"), ("aten", "causal_conv1d")

    def inputs(
        self, spec: Conv1dSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, biased: bool = True,
        document: int = DOCUMENT,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """x [batch, T, channels], a slice of a wider projection, weight [channels, width], and bias [channels] or None.
        document: length of one, in `ids`."""
        draw, size = Draw(device, spec.dtype, seed), (batch, seq_len, spec.channels)
        x, weight, bias = draw.slice(*size), draw(spec.channels, spec.width), draw(spec.channels)
        return [x, weight, bias if biased else None], draw(*size)

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        ids = self.ids(shape, device)
        return kernel if ids is None else lambda *t: kernel(*t, document_ids=ids[: len(t[0])])

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: of x and y; of dy, x and dx."""
        spec, flops = shape.spec, shape.batch * shape.spec.flops(shape.seq_len)
        moved = shape.batch * shape.seq_len * spec.channels * base.element_size(spec.dtype)
        return Work(flops, 2 * moved), Work(3 * flops, 3 * moved)

    def label(self, shape: Shape) -> str:
        return f"{shape.spec.channels} channels"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(Conv1dSpec(64, 4, "float32"), 2, 128)
            return
        for seq_len in base.LENGTHS:
            yield Shape(Conv1dSpec(5376, 4), base.TOKENS // seq_len, seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "width 4", Shape(Conv1dSpec(256, 4, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def sized(
        self, channels: int = 5376, width: int = 4, seq_len: int = 4096, dtype: str = "bfloat16", tokens: int = base.TOKENS,
        packed: bool = False, document: int = DOCUMENT,
    ) -> Shape:  # fmt: skip
        spec = Conv1dSpec(channels, width, dtype, bool(packed))
        return Shape(spec, max(1, tokens // seq_len), seq_len, None, (("document", document),))


OPERATION = Conv1d()
