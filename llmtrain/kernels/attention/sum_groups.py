"""Sums of the gradients of keys and values over the programs of dkdv that share them: both in one launch."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit

BLOCK, NUM_WARPS = 1024, 4


def sum_groups(dk: Tensor, dv: Tensor, n_kv: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[batch, T, n_kv * parts, width] in fp32, contiguous, each of its width -> [batch, T, n_kv, width] in `dtype`."""
    into = [torch.empty((*t.shape[:2], n_kv, t.shape[3]), dtype=dtype, device=t.device) for t in (dk, dv)]
    n_k, n_v = (t.numel() for t in into)
    _sum_groups[cdiv(max(n_k, n_v), BLOCK), 2](
        dk, dv, *into, n_k, n_v,
        K_WIDTH=dk.shape[3], V_WIDTH=dv.shape[3], PARTS=dk.shape[2] // n_kv, BLOCK=BLOCK, num_warps=NUM_WARPS,
    )  # fmt: skip
    return into[0], into[1]


@jit
def _sum_groups(
    dk, dv, out_k, out_v, n_k, n_v, K_WIDTH: tl.constexpr, V_WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (block of results; 0: of keys, 1: of values). The order of a sum is that of the parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(1) == 0:
        _sum_parts(dk, out_k, at, n_k, K_WIDTH, PARTS, BLOCK)
    else:
        _sum_parts(dv, out_v, at, n_v, V_WIDTH, PARTS, BLOCK)


@triton.jit
def _sum_parts(source, out, at, n, WIDTH: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    first = at // WIDTH * (WIDTH * PARTS) + at % WIDTH
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(PARTS):
        total += tl.load(source + first + part * WIDTH, mask=at < n, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < n)
