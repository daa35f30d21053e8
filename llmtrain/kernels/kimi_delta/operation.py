"""Kimi Delta Attention's rule as tests, doctor and bench see it."""

from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.gated_delta.operation import GatedDelta
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.operation import Draw, Shape, Work


class KimiDelta(GatedDelta):
    name, spec, tuned = "kimi_delta", KimiDeltaSpec, True

    def inputs(
        self, spec: KimiDeltaSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, most: float = 1.0,
        state: bool = False, packed: bool = False,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """Inputs of the gated delta rule, with the logarithm of the decay of each channel, [batch, T, heads, key channels].
        packed: for searches, with documents and a state."""
        (q, k, v, _, *rest), dy = super().inputs(spec, batch, seq_len, device, seed, most, state)
        decay = -F.softplus(Draw(device, spec.dtype, seed + 1).wide(*v.shape[:3], spec.key_head_dim) - 2)
        return [q, k, v, decay, *rest], dy

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """Bytes: decays are as many as the keys' channels of all heads, in fp32."""
        more = shape.batch * shape.seq_len * shape.spec.n_heads * (shape.spec.key_head_dim - 1) * 4
        forward, backward = super().work(shape)
        return Work(forward.flops, forward.bytes + more), Work(backward.flops, backward.bytes + 2 * more)

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(KimiDeltaSpec(2, 2, 16, 24, "float32"), 2, 64)
            return
        for seq_len in (*base.LENGTHS, 16384):
            yield Shape(KimiDeltaSpec(32, 32, 128, 128), base.TOKENS // seq_len, seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "", Shape(KimiDeltaSpec(4, 4, 64, 64, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def sized(
        self, heads: int = 32, key_head_dim: int = 128, value_head_dim: int = 128, seq_len: int = 4096,
        dtype: str = "bfloat16", tokens: int = base.TOKENS, packed: bool = False,
    ) -> Shape:  # fmt: skip
        spec = KimiDeltaSpec(heads, heads, key_head_dim, value_head_dim, dtype)
        return Shape(spec, max(1, tokens // seq_len), seq_len, None, (("packed", bool(packed)),))

    def of_model(self, spec: KimiDeltaSpec, batch: int, seq_len: int, documents: bool) -> Shape:
        return Shape(spec, batch, seq_len, None, (("packed", documents),))


OPERATION = KimiDelta()
