"""Mamba-3's scan as tests, doctor and bench see it."""

import math
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels import operation as base
from llmtrain.kernels.mamba3.reference import State
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.operation import BySequence, Draw, Function, Shape, Work

SIZES = ((32, 64, 128), (64, 64, 128))
"""Heads, head_dim and d_state; the first is what the authors' kernels are tuned for."""


class Mamba3(BySequence):
    name, spec, tuned = "mamba3", Mamba3Spec, False
    slow_reference = True
    leaves = (
        *("q", "k", "v", "_log_decay", "_dt", "_later", "_rate", "q_bias", "k_bias", "D"),
        *("_h", "_angle", "_last_k", "_last_v"),
    )

    def inputs(
        self, spec: Mamba3Spec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0, state: bool = False,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """q, k [batch, T, groups, d_state] as after a norm, v [batch, T, heads, head_dim], a slice of a projection; in fp32
        log_decay, dt and later [batch, T, heads], rate [batch, T, angles], q_bias and k_bias [heads, d_state], D [heads]; with
        `state` the four tensors of a State too. Time steps from 1e-3 to 1."""
        draw = Draw(device, spec.dtype, seed)
        q, k = (draw(batch, seq_len, spec.n_groups, spec.d_state) for _ in range(2))
        v = draw.slice(batch, seq_len, spec.n_heads * spec.head_dim).unflatten(-1, (spec.n_heads, spec.head_dim))
        dt, decay, later = (draw.wide(batch, seq_len, spec.n_heads) for _ in range(3))
        dt = F.softplus(2 * dt - 3)
        rate = math.pi * draw.wide(batch, seq_len, spec.angles).tanh()
        biases = [1 + draw.wide(spec.n_heads, spec.d_state) / 4 for _ in range(2)]
        found = [q, k, v, -F.softplus(decay) * dt, dt, later.sigmoid(), rate, *biases, draw.wide(spec.n_heads)]
        up = draw(batch, seq_len, spec.n_heads, spec.head_dim)
        if state:
            shapes = ((spec.head_dim, spec.d_state), (spec.angles,), (spec.d_state,), (spec.head_dim,))
            found += [draw.wide(batch, spec.n_heads, *shape) for shape in shapes]
        return found, up

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        return lambda *tensors: kernel(*tensors[:10], State(*tensors[10:]) if tensors[10:] else None)[0]

    def pieces(self, shape: Shape, found: Any) -> list[Tensor]:
        """Vectors and biases are those of all sequences."""
        return [t if t.ndim < 3 else t[-1:] for t in found]

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """FLOP of the recurrence; bytes: q, k, v, y, and four numbers in fp32 per token and head, and in the backward these, dy and
        all gradients, once each."""
        spec, tokens = shape.spec, shape.batch * shape.seq_len
        size, flops = base.element_size(spec.dtype), float(shape.batch * spec.flops(shape.seq_len))
        keys = 2 * tokens * spec.n_groups * spec.d_state * size + tokens * spec.angles * 4
        values, gates = tokens * spec.n_heads * spec.head_dim * size, 3 * tokens * spec.n_heads * 4
        return Work(flops, keys + 2 * values + gates), Work(2 * flops, 2 * keys + 3 * values + 2 * gates)

    def label(self, shape: Shape) -> str:
        spec = shape.spec
        return f"{spec.n_heads}x{spec.head_dim}, d_state {spec.d_state}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield Shape(Mamba3Spec(2, 16, 16, 1, 4, 32, "float32"), 2, 64)
            return
        for heads, head_dim, d_state in SIZES:
            for seq_len in (*base.LENGTHS, 16384):
                spec = Mamba3Spec(heads, head_dim, d_state, 1, d_state // 4)
                yield Shape(spec, base.TOKENS // seq_len, seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        yield "scan", Shape(Mamba3Spec(4, 64, 64, 1, 16, 64, dtype), base.SELFTEST_BATCH, base.SELFTEST_LEN)


OPERATION = Mamba3()
