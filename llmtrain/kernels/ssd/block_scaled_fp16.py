"""Block-scaled fp16: fp16 with one power of two per tile, an eighth of bf16's rounding error in the same bytes.

The backward for 16-bit inputs may keep states and their gradients in this format: the gradient of A is a small difference of
products with them (docs/kernels.md). B and C are converted once, exactly except for what is below 2^-38 of a tile's largest
number.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.head_blocks import token_stride
from llmtrain.kernels.ssd.triton_forward import load_tile, padded


class ScaledBC(NamedTuple):
    """B and C, [batch, T, groups, d_state]. With exponents they are fp16, to be multiplied by 2^exponent: one per tile of
    tokens, [2, batch, tiles, groups] in fp32.
    """

    B: Tensor
    C: Tensor
    exponents: Tensor | None


def scale_bc(B: Tensor, C: Tensor, tile: int, fp16: bool, into: tuple[Tensor, Tensor] | None = None) -> ScaledBC:
    """B and C in block-scaled fp16 if `fp16` and they have 16 bits; else as they are.

    into: memory for the result, like B and C with contiguous groups (that of their gradients, which are written when the
        result is no longer needed).
    """
    bc, (batch, seq_len, n_groups, d_state) = empty_scaled_bc(B, C, tile, fp16, into), B.shape
    if bc.exponents is not None:
        _scale_to_fp16[2 * n_groups, cdiv(seq_len, tile), batch](
            *(B, C, *bc, seq_len, *B.stride()[:3], *C.stride()[:3], token_stride(bc.B), token_stride(bc.C)),
            D_STATE=d_state,
            TILE=tile,
            BLOCK_DSTATE=padded(d_state),
            num_warps=4,
        )
    return bc


def empty_scaled_bc(B: Tensor, C: Tensor, tile: int, fp16: bool, into: tuple[Tensor, Tensor] | None = None) -> ScaledBC:
    """Memory for the result of scale_bc; B and C themselves where they are not converted."""
    if not fp16 or B.element_size() > 2:
        return ScaledBC(B, C, None)
    b, c = into or (torch.empty(B.shape, dtype=B.dtype, device=B.device) for _ in range(2))
    shape = (2, B.shape[0], cdiv(B.shape[1], tile), B.shape[2])
    exponents = torch.empty(shape, dtype=torch.float32, device=B.device)
    return ScaledBC(b.view(torch.float16), c.view(torch.float16), exponents)


def split_exponents(exponents: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Exponents of the states and of their gradients."""
    return (None, None) if exponents is None else (exponents[0], exponents[1])


@jit
def _scale_to_fp16(
    B, C, b, c, exponents, seq_len, B_row, B_token, B_group, C_row, C_token, C_group, b_token, c_token,
    D_STATE: tl.constexpr, TILE: tl.constexpr, BLOCK_DSTATE: tl.constexpr,
):  # fmt: skip
    """Program (groups of B, then groups of C; tile; row of the batch)."""
    groups, tiles, batch = tl.num_programs(0) // 2, tl.num_programs(1), tl.num_programs(2)
    which, group = tl.program_id(0) // groups, tl.program_id(0) % groups
    tile, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, n = tl.arange(0, TILE), tl.arange(0, BLOCK_DSTATE)
    first = tile * TILE
    if which == 1:
        B, B_row, B_token, B_group, b, b_token = C, C_row, C_token, C_group, c, c_token
    B += row * B_row + group * B_group + first.to(tl.int64) * B_token
    found = load_tile(B, q, n, B_token, seq_len - first, D_STATE).to(tl.float32)
    exponent = exponent_of(tl.max(tl.abs(found)))
    tl.store(exponents + ((which * batch + row) * tiles + tile) * groups + group, exponent)
    b += (row * seq_len + first) * b_token + group * D_STATE
    to = q[:, None] * b_token + n[None, :]
    inside = (first + q < seq_len)[:, None] & (n < D_STATE)[None, :]
    tl.store(b + to, (found * tl.exp2(-exponent)).to(tl.float16), mask=inside)


@triton.jit
def exponent_of(largest):
    """The e for which a number of magnitude at most `largest` is at most 2^14 after division by 2^e."""
    return tl.floor(tl.log2(tl.maximum(largest, 1e-30))) - 13.0


@triton.jit
def load_exponents(exponents, state, p, HEAD_DIM: tl.constexpr, EXPONENT_BLOCK: tl.constexpr):
    """Exponents of one state (or of a tile added to it): one per column, [1, columns], or one number if all columns share it."""
    PARTS: tl.constexpr = (HEAD_DIM + EXPONENT_BLOCK - 1) // EXPONENT_BLOCK
    if PARTS == 1:
        return tl.load(exponents + state)
    else:
        return tl.load(exponents + state * PARTS + tl.minimum(p // EXPONENT_BLOCK, PARTS - 1))[None, :]
