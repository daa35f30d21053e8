"""Heads per program for kernels whose programs loop over the heads of a chunk, and the sum of several programs' results.

Sums over the heads of one program stay in registers; sums over programs are taken in a fixed order.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

_ELEMENTS = 1024  # elements per program of a sum


def token_stride(t: Tensor) -> int:
    """Token stride of an output [batch, T, heads, width] whose heads, and whose sequences, follow each other without gaps."""
    batch, seq_len, heads, width = t.shape
    row, token, head, element = t.stride()
    token = row if seq_len == 1 else token  # the stride of a single token is arbitrary
    assert element == 1 and (head == width or heads == 1) and (row == seq_len * token or batch == 1)
    return token


def head_blocks(x: Tensor, n_groups: int, tiles: int, launch: HeadLoopLaunch, num_sms: int) -> tuple[int, int]:
    """Heads of one program, and programs that share the heads of a group."""
    per_group = x.shape[2] // n_groups
    heads = launch.heads(per_group, x.shape[0] * tiles * n_groups, num_sms)
    return heads, cdiv(per_group, heads)


def empty_head_blocks(like: Tensor, blocks: int) -> Tensor:
    """Memory for the sums over heads of each block of heads, [blocks, *like] in fp32."""
    return torch.empty((blocks, *like.shape), dtype=torch.float32, device=like.device)


def sum_head_blocks(parts: Tensor, out: Tensor) -> None:
    blocks, count = parts.shape[0], out.numel()
    width = out.shape[2] * out.shape[3]
    _sum_head_blocks[(cdiv(count, _ELEMENTS),)](
        *(parts, out, count, blocks), WIDTH=width, TOKEN_STRIDE=token_stride(out), BLOCK=_ELEMENTS, num_warps=4
    )


@jit
def _sum_head_blocks(
    parts, out, count, blocks, WIDTH: tl.constexpr, TOKEN_STRIDE: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Program (tile of elements). WIDTH: elements of a token in parts; TOKEN_STRIDE: of out."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    of_part = at.to(tl.int64)
    for _ in range(blocks):
        total += tl.load(parts + of_part, mask=at < count, other=0.0)
        of_part += count
    to = (at // WIDTH).to(tl.int64) * TOKEN_STRIDE + at % WIDTH
    tl.store(out + to, total.to(out.dtype.element_ty), mask=at < count)
