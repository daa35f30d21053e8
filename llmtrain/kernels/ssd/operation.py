"""Mamba-2's scan as tests, doctor, bench and tuning see it."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.operation import BySequence, Draw, Function, Shape, Work
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec

SIZES = ((80, 64, 128), (80, 64, 64), (64, 64, 128))
"""Heads, head_dim and d_state."""


class SSD(BySequence):
    name, spec = "ssd", SSDSpec
    leaves = ("x", "dt", "A", "B", "C", "D", "dt_bias", "_state")

    def inputs(
        self, spec: SSDSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, spread: bool = False,
        state: bool = False, packed: bool = False,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """x [batch, T, heads, head_dim], dt [batch, T, heads], A, B, C [batch, T, groups, d_state], D and dt_bias as after a
        projection and a convolution: x, B and C are slices of one row. With `state` [batch, heads, head_dim, d_state] too.

        spread: time steps from 1e-4 to 1 and decays per token from none to all, dt a slice whose rows begin anywhere; else as a new
        model has them. packed: for searches, with documents and a state.
        """
        draw = Draw(device, spec.dtype, seed)
        widths = [spec.n_heads * spec.head_dim, spec.n_groups * spec.d_state, spec.n_groups * spec.d_state]
        x, B, C = draw(batch, seq_len, sum(widths)).split(widths, dim=-1)
        x = x.unflatten(-1, (spec.n_heads, spec.head_dim))
        B, C = (t.unflatten(-1, (spec.n_groups, spec.d_state)) for t in (B, C))
        if spread:
            dt = (2 * draw.wide(batch, seq_len, 3 + spec.n_heads)).to(draw.dtype)[..., 3:]
            A, D, dt_bias = -(2 * draw.wide(spec.n_heads)).exp(), draw.wide(spec.n_heads), draw.wide(spec.n_heads) - 3
        else:
            dt, A = draw(batch, seq_len, spec.n_heads), -(1 + 15 * draw.uniform(spec.n_heads))
            D, dt_bias = draw.wide(spec.n_heads), draw.wide(spec.n_heads) - 4
        up = draw(*x.shape)
        first = [draw.wide(batch, spec.n_heads, spec.head_dim, spec.d_state)] if state else []
        return [x, dt, A, B, C, D, dt_bias, *first], up

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        return lambda *tensors: kernel(*tensors)[0]

    def reference(self, shape: Shape, device: str) -> Function:
        """Inputs with short chunks, for what is kept per pair of tokens is most of it."""
        return super().reference(replace(shape, spec=replace(shape.spec, chunk_size=64)), device)

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """FLOP with pairs within chunks of 128 tokens. Bytes: x, y, dt, B and C, and in the backward dy and all gradients, once
        each."""
        spec, tokens, chunk = shape.spec, shape.batch * shape.seq_len, 128
        size = base.element_size(spec.dtype)
        c = tokens * spec.n_groups * spec.d_state * (chunk + 1)
        d = tokens * spec.n_heads * spec.head_dim * (chunk + 1)
        s = 2 * tokens * spec.n_heads * spec.head_dim * spec.d_state
        widths = (spec.n_heads * spec.head_dim, 2 * spec.n_groups * spec.d_state, spec.n_heads)
        x, bc, dt = (tokens * width * size for width in widths)
        return Work(c + d + 2 * s, 2 * x + bc + dt), Work(3 * c + 2 * d + 5 * s, 3 * x + 2 * bc + 2 * dt)

    def label(self, shape: Shape) -> str:
        return f"{shape.spec.n_heads}x{shape.spec.head_dim}, d_state {shape.spec.d_state}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield self.sized(2, 16, 16, 1, 128, "float32", 256)
            return
        for size in SIZES:
            for seq_len in base.LENGTHS:
                yield self.sized(*size, seq_len=seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "scan", Shape(SSDSpec(4, 64, 64, 1, 64, dtype=dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def backends(self, shape: Shape, here: Platform) -> list[str]:
        """Backends to time; on a GPU with the reference at one length: it compiles for many seconds, and is far behind."""
        slow = here.vendor != "cpu" and shape.seq_len != 4096
        return [name for name in super().backends(shape, here) if name != "reference" or not slow]

    def sized(
        self, heads: int = 80, head_dim: int = 64, d_state: int = 128, groups: int = 1, seq_len: int = 4096,
        dtype: str = "bfloat16", tokens: int = base.TOKENS, packed: bool = False,
    ) -> Shape:  # fmt: skip
        spec = SSDSpec(heads, head_dim, d_state, groups, 256, dtype=dtype)
        return Shape(spec, max(1, tokens // seq_len), seq_len, None, (("packed", bool(packed)),))

    def of_model(self, spec: SSDSpec, batch: int, seq_len: int, documents: bool) -> Shape:
        return Shape(spec, batch, seq_len, None, (("packed", documents),))

    def refusal(self, shape: Shape) -> str | None:
        heads, groups = shape.spec.n_heads, shape.spec.n_groups
        if heads % groups:
            return f"heads must be a multiple of groups, and {heads} is no multiple of {groups}"
        return super().refusal(shape)


OPERATION = SSD()
