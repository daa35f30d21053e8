"""The gated delta rule as tests, doctor and bench see it."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.operation import BySequence, Draw, Function, Shape, Work

SIZES = ((16, 16, 128), (8, 8, 256), (16, 8, 128), (8, 4, 256))
"""Heads, key heads, channels of keys and of values."""


class GatedDelta(BySequence):
    name, spec, tuned = "gated_delta", GatedDeltaSpec, False
    slow_reference = True
    leaves = ("q", "k", "v", "_log_decay", "_beta", "_state")

    def inputs(
        self, spec: GatedDeltaSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, most: float = 1.0,
        state: bool = False,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """q, k [batch, T, key heads, channels] of length 1, v [batch, T, heads, channels], the logarithm of the decay and beta,
        up to `most`, [batch, T, heads] in fp32; with `state` [batch, heads, key channels, value channels] too."""
        draw = Draw(device, spec.dtype, seed)
        keys, heads = (batch, seq_len, spec.n_key_heads, spec.key_head_dim), (batch, seq_len, spec.n_heads)
        q, k = (F.normalize(draw.wide(*keys), dim=-1).to(draw.dtype) for _ in range(2))
        v, dy = (draw(*heads, spec.value_head_dim) for _ in range(2))
        decay, beta = -F.softplus(draw.wide(*heads) - 2), most * draw.wide(*heads).sigmoid()
        first = [draw.wide(batch, spec.n_heads, spec.key_head_dim, spec.value_head_dim)] if state else []
        return [q, k, v, decay, beta, *first], dy

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        return lambda *tensors: kernel(*tensors)[0]

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: q, k, v, y, decays and beta; in the backward these, dy and all gradients, once each."""
        spec, tokens, flops = (
            shape.spec,
            shape.batch * shape.seq_len,
            float(shape.batch * shape.spec.flops(shape.seq_len)),
        )
        size = base.element_size(spec.dtype)
        keys = 2 * tokens * spec.n_key_heads * spec.key_head_dim * size
        values, gates = tokens * spec.n_heads * spec.value_head_dim * size, 2 * tokens * spec.n_heads * 4
        return Work(flops, keys + 2 * values + gates), Work(2 * flops, 2 * keys + 3 * values + 2 * gates)

    def label(self, shape: Shape) -> str:
        spec = shape.spec
        return f"{spec.n_heads} ({spec.n_key_heads}) x {spec.key_head_dim}x{spec.value_head_dim}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(GatedDeltaSpec(2, 1, 16, 24, "float32"), 2, 64)
            return
        for heads, key_heads, channels in SIZES:
            for seq_len in (*base.LENGTHS, 16384):
                yield Shape(GatedDeltaSpec(heads, key_heads, channels, channels), base.TOKENS // seq_len, seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "2 key heads", Shape(GatedDeltaSpec(4, 2, 64, 64, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)


OPERATION = GatedDelta()
