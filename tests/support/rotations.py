"""Inputs of rotary positions, shared by the tests in Triton's interpreter and on a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tests.support import mamba_parts as around


def tables(*shape: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    """Cosines and sines, in fp32."""
    angle = around.draw(*shape, seed=5, dtype=torch.float32, device=device)
    return angle.cos(), angle.sin()


def inputs(
    batch: int,
    seq_len: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[Tensor]:
    """q and k, slices of one projection."""
    width = (heads + kv_heads) * head_dim + 8
    fused = around.draw(batch, seq_len, width, seed=seq_len, dtype=dtype, device=device)
    q, k, _ = fused.split((heads * head_dim, kv_heads * head_dim, 8), dim=-1)
    return [q.unflatten(-1, (heads, head_dim)), k.unflatten(-1, (kv_heads, head_dim))]


def both(kernel: Callable[..., tuple[Tensor, Tensor]], cos: Tensor, sin: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """q and k as one output, for around.outcome; in float64 with tables as wide."""

    def run(q: Tensor, k: Tensor) -> Tensor:
        wide = (t.to(torch.promote_types(q.dtype, t.dtype)) for t in (cos, sin))
        return torch.cat([t.flatten() for t in kernel(q, k, *wide)])

    return run
