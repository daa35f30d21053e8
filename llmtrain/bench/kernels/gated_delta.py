"""The cells of the gated delta rule, beside the kernels of flash-linear-attention."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.bench.kernels import autotuned
from llmtrain.bench.kernels.backends import backends, built
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work, device, draw, generator, leaf, run_both
from llmtrain.bench.kernels.scan import by_sequence, last_sequence
from llmtrain.kernels import platform
from llmtrain.kernels.gated_delta.reference import ReferenceGatedDelta
from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec

TOKENS = 16384
"""Of all sequences of a cell."""
LENGTHS = (2048, 4096, 8192, 16384)
SHAPES = ((16, 16, 128), (8, 8, 256), (16, 8, 128), (8, 4, 256))
"""Heads, key heads, channels of keys and of values."""
BARS = (Bar("fla", "sum", 1.0),)


def cells(tiny: bool) -> Iterator[Cell]:
    if tiny:
        yield cell(GatedDeltaSpec(2, 1, 16, 24, "float32"), 64, 128, ())
        return
    for heads, key_heads, channels in SHAPES:
        for seq_len in LENGTHS:
            yield cell(GatedDeltaSpec(heads, key_heads, channels, channels), seq_len, TOKENS, BARS)


def cell(spec: GatedDeltaSpec, seq_len: int, tokens: int, bars: tuple[Bar, ...]) -> Cell:
    dtype = getattr(torch, spec.dtype)
    batch = tokens // seq_len
    reference = ReferenceGatedDelta(spec)

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        g = generator(seed)
        keys, heads = (batch, seq_len, spec.n_key_heads, spec.key_head_dim), (batch, seq_len, spec.n_heads)
        q, k = (F.normalize(draw(g, *keys), dim=-1).to(dtype) for _ in range(2))
        v, dy = (draw(g, *heads, spec.value_head_dim, dtype=dtype) for _ in range(2))
        decay, beta = -F.softplus(draw(g, *heads) - 2), draw(g, *heads).sigmoid()
        return [leaf(t) for t in (q, k, v, decay, beta)], dy

    flops, forward, backward = float(batch * spec.flops(seq_len)), *_bytes(spec, tokens, dtype.itemsize)
    return Cell(
        "gated_delta", f"{spec.n_heads} ({spec.n_key_heads}) x {spec.key_head_dim}x{spec.value_head_dim}", seq_len,
        ("y", "dq", "dk", "dv", "d_log_decay", "d_beta"), inputs, lambda: _contenders(spec, inputs),
        lambda leaves, dy: by_sequence(lambda *t: reference(*t)[0], leaves, dy),
        Work(flops, forward), Work(2 * flops, backward), bars, last_sequence,
    )  # fmt: skip


def _bytes(spec: GatedDeltaSpec, tokens: int, size: int) -> tuple[int, int]:
    """Bytes of the forward pass (q, k, v, y, decays, beta) and of the backward (these, dy and all gradients), once each."""
    keys = 2 * tokens * spec.n_key_heads * spec.key_head_dim * size
    values, gates = tokens * spec.n_heads * spec.value_head_dim * size, 2 * tokens * spec.n_heads * 4
    return keys + 2 * values + gates, 2 * keys + 3 * values + 2 * gates


def _contenders(spec: GatedDeltaSpec, inputs: Callable[[int], tuple[list[Tensor], Tensor]]) -> list[Contender]:
    names = [name for name in backends("gated_delta", spec) if name != "fla"]
    if device() == "cuda":
        names.remove("reference")  # its loop over chunks is unrolled, and compiles for minutes
    found = [Contender(name, lambda name=name: _outputs(built("gated_delta", name, spec))) for name in names]
    if device() == "cuda" and importlib.util.find_spec("fla") is not None:

        def warm(k: int, n: int) -> None:
            leaves, dy = inputs(0)
            with autotuned.compile_share(k, n):
                run_both(_fla(spec), leaves, dy)

        found.append(Contender("fla", lambda: _fla(spec), True, warm))
    return found


def _outputs(kernel: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., Tensor]:
    return lambda *leaves: kernel(*leaves)[0]


def _fla(spec: GatedDeltaSpec) -> Callable[..., Tensor]:
    """fla-core's kernels, which time their variants on their first call. On Hopper with Triton 3.4 to 3.7.0 it refuses its
    backward pass (its issue 640); here it is let through, and the errors beside the times say what comes of it."""
    from fla.ops.common import chunk_o  # type: ignore[import-not-found]

    from llmtrain.kernels.gated_delta.fla import build

    chunk_o.TRITON_ABOVE_3_7_1 = True
    autotuned.hasten()
    return _outputs(build(spec, platform.detect(), ""))
