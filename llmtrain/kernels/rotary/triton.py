"""Rotary positions in Triton: queries and keys in one launch, each read once and written once.

A rotation's gradient is the inverse rotation, so the backward is the same kernel with the angles negated; it needs the
tables alone.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels import tuning
from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.rotary.triton_launch import Launch


def default_launch(spec: RotarySpec, platform: Platform) -> Launch:
    """Launch parameters from the tuning table."""
    return tuning.select("rotary", spec.dtype, {"head_dim": spec.head_dim}, platform).launch


def build(spec: RotarySpec, platform: Platform, variant: str) -> TritonRotary:
    return TritonRotary(default_launch(spec, platform))


class TritonRotary:
    """The signature of the reference. Computes in fp32; results are contiguous and have the inputs' dtypes."""

    def __init__(self, launch: Launch):
        self.options = launch.dump()

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        return call(rotary, q, k, cos, sin, False, self.options)


def launch_rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, inverse: bool, options: str) -> tuple[Tensor, Tensor]:
    """q, k: [batch, T, heads, head_dim], slices of a projection without a copy if head_dim is contiguous; cos, sin:
    [T, 1, head_dim / 2] or [batch, T, 1, head_dim / 2] in fp32. inverse: rotates by the negative angles.
    """
    q, k = (t if t.stride(-1) == 1 else t.contiguous() for t in (q, k))
    cos, sin = cos.contiguous(), sin.contiguous()
    batch, seq_len, n_q, head_dim = q.shape
    n_k, half = k.shape[2], head_dim // 2
    assert k.shape == (batch, seq_len, n_k, head_dim) and q.dtype == k.dtype
    assert cos.shape == sin.shape and cos.shape[-3:] == (seq_len, 1, half) and cos.dtype == torch.float32
    out_q, out_k = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k))
    launch = Launch.parse(options)
    blocks = cdiv(n_q, launch.block_heads) + cdiv(n_k, launch.block_heads)
    _rotate[cdiv(seq_len, launch.block_tokens), blocks, batch](
        *(q, k, cos, sin, out_q, out_k),
        *(seq_len, n_q, n_k, seq_len * half if cos.ndim == 4 else 0, *q.stride()[:3], *k.stride()[:3]),
        HALF=half,
        COLUMNS=next_power_of_2(half),
        BLOCK_TOKENS=launch.block_tokens,
        BLOCK_HEADS=launch.block_heads,
        INVERSE=inverse,
        num_warps=launch.num_warps,
    )
    return out_q, out_k


rotary = operator("rotary", launch_rotary, replayed=True)


@torch.library.register_fake(rotary)
def _(q, k, cos, sin, inverse, options):
    return q.new_empty(q.shape), k.new_empty(k.shape)


def _setup_context(ctx, inputs, output) -> None:
    _, _, cos, sin, ctx.inverse, ctx.options = inputs
    ctx.save_for_backward(cos, sin)


def _backward(ctx, dq, dk):
    return *call(rotary, dq, dk, *ctx.saved_tensors, not ctx.inverse, ctx.options), None, None, None, None


register_autograd(rotary, _backward, _setup_context)


@jit
def _rotate(
    q, k, cos, sin, out_q, out_k,
    seq_len, n_q, n_k, table_row, q_row, q_token, q_head, k_row, k_token, k_head,
    HALF: tl.constexpr, COLUMNS: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_HEADS: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """Program (tile of tokens, block of q's heads or after them of k's, row of the batch)."""
    t, column = tl.program_id(0) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS), tl.arange(0, COLUMNS)
    block, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    inside = (t < seq_len)[:, None] & (column < HALF)[None, :]
    at = row * table_row + t[:, None] * HALF + column[None, :]
    c = tl.load(cos + at, mask=inside, other=0.0)
    s = tl.load(sin + at, mask=inside, other=0.0)
    if INVERSE:
        s = -s
    q_blocks = tl.cdiv(n_q, BLOCK_HEADS)
    if block < q_blocks:
        _heads(
            q + row * q_row, out_q, row, t, column, inside, c, s, block * BLOCK_HEADS, n_q, seq_len, q_token, q_head,
            HALF, BLOCK_HEADS,
        )  # fmt: skip
    else:
        first = (block - q_blocks) * BLOCK_HEADS
        _heads(
            k + row * k_row, out_k, row, t, column, inside, c, s, first, n_k, seq_len, k_token, k_head, HALF, BLOCK_HEADS,
        )  # fmt: skip


@triton.jit
def _heads(
    source, out, row, t, column, inside, c, s, first, n_heads, seq_len, token, head_stride,
    HALF: tl.constexpr, BLOCK_HEADS: tl.constexpr,
):  # fmt: skip
    t = t.to(tl.int64)[:, None]
    for head in range(first, tl.minimum(first + BLOCK_HEADS, n_heads)):
        of_head = source + t * token + head * head_stride + column[None, :]
        a = tl.load(of_head, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(of_head + HALF, mask=inside, other=0.0).to(tl.float32)
        to = out + ((row * seq_len + t) * n_heads + head) * (2 * HALF) + column[None, :]
        tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
        tl.store(to + HALF, (a * s + b * c).to(out.dtype.element_ty), mask=inside)
