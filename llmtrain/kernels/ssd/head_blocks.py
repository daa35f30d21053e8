"""Kernels that take a chunk's heads one after the other: how many to a program, and how what several programs found is added.

Sums over the heads of one program stay in registers; over programs they are added in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

_ELEMENTS = 1024  # elements per program of a sum


def token_stride(t: Tensor) -> int:
    """Of a tensor to write, [batch, T, heads, width]: heads side by side, one sequence after the other."""
    batch, seq_len, heads, width = t.shape
    row, token, head, element = t.stride()
    token = row if seq_len == 1 else token  # that of a single token means nothing
    assert element == 1 and (head == width or heads == 1) and (row == seq_len * token or batch == 1)
    return token


def head_blocks(x: Tensor, n_groups: int, tiles: int, launch: HeadLoopLaunch, num_sms: int) -> tuple[int, int]:
    """Heads of one program, and programs that share the heads of a group."""
    per_group = x.shape[2] // n_groups
    heads = launch.heads(per_group, x.shape[0] * tiles * n_groups, num_sms)
    return heads, triton.cdiv(per_group, heads)


def empty_head_blocks(like: Tensor, blocks: int) -> Tensor:
    """Where the programs of all blocks put their sums over heads, [blocks, *like]."""
    return torch.empty((blocks, *like.shape), dtype=torch.float32, device=like.device)


def sum_head_blocks(parts: Tensor, out: Tensor) -> None:
    blocks, count = parts.shape[0], out.numel()
    width = out.shape[2] * out.shape[3]
    _sum_head_blocks[(triton.cdiv(count, _ELEMENTS),)](
        *(parts, out, count, blocks), WIDTH=width, TOKEN_STRIDE=token_stride(out), BLOCK=_ELEMENTS, num_warps=4
    )


@triton.jit
def _sum_head_blocks(
    parts, out, count, blocks, WIDTH: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (tile of elements). WIDTH: of a token, in parts; TOKEN: from one to the next, in out."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    of_part = at.to(tl.int64)
    for _ in range(blocks):
        total += tl.load(parts + of_part, mask=at < count, other=0.0)
        of_part += count
    to = (at // WIDTH).to(tl.int64) * TOKEN_STRIDE + at % WIDTH
    tl.store(out + to, total.to(out.dtype.element_ty), mask=at < count)
