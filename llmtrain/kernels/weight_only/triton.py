"""Products of few rows with weights in 8 bits, in Triton: codes are read as they are stored and widened in registers.

Decoding multiplies each weight by one number per row of the batch, so it takes what reading the weights takes; a widened copy,
which cuBLAS would need, is read and written beside them. Sums are in fp32 and scaled at their end. A row's result depends on
nothing but the row and the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.operators import operator


class Tile(NamedTuple):
    """outputs: rows of the weight in a program. inputs: columns of it that are read at a time."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1


ONE_ROW = Tile(2, 1024, 2)
FEW_ROWS = Tile(32, 256, 4, 4)
"""The fastest of those measured over Llama-3.2-1B's products on an H100, at 1 and 16 rows."""


def launch(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """The reference's result. x: of 64 rows at most, which one tile has."""
    rows, d_in = x.numel() // max(x.shape[-1], 1), x.shape[-1]
    d_out = codes.shape[0]
    assert codes.shape == (d_out, d_in) and scales.shape == (d_out,) and rows <= 64
    assert codes.is_contiguous() and scales.is_contiguous()
    x, y = x.contiguous(), x.new_empty((*x.shape[:-1], d_out))
    if rows == 1:
        _one_row[(cdiv(d_out, ONE_ROW.outputs),)](
            *(x, codes, scales, y, d_out, d_in),
            OUTPUTS=ONE_ROW.outputs,
            INPUTS=ONE_ROW.inputs,
            num_warps=ONE_ROW.num_warps,
        )
    elif rows:
        _few_rows[(cdiv(d_out, FEW_ROWS.outputs),)](
            *(x, codes, scales, y, rows, d_out, d_in),
            ROWS=max(16, next_power_of_2(rows)),  # 16: what a matrix instruction takes
            OUTPUTS=FEW_ROWS.outputs,
            INPUTS=FEW_ROWS.inputs,
            STAGES=FEW_ROWS.num_stages if rows <= 16 else 2,  # what fits shared memory
            WEIGHT_LEFT=codes.dtype != torch.int8,  # measured; each is slower with the other format
            num_warps=FEW_ROWS.num_warps,
        )
    return y


weight_only_linear = operator("weight_only_linear", launch, replayed=True)


@torch.library.register_fake(weight_only_linear)
def _(x, codes, scales):
    return x.new_empty((*x.shape[:-1], codes.shape[0]))


@jit
def _one_row(x, codes, scales, y, d_out, d_in, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr):
    """Program (tile of outputs). Each thread keeps sums of its own columns, which are added up once."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    column = tl.arange(0, INPUTS)
    exists = output < d_out
    codes += output.to(tl.int64)[:, None] * d_in
    acc = tl.zeros((OUTPUTS, INPUTS), tl.float32)
    for start in range(0, d_in, INPUTS):
        inside = start + column < d_in
        code = tl.load(codes + start + column[None, :], mask=exists[:, None] & inside[None, :], other=0.0)
        acc += code.to(tl.float32) * tl.load(x + start + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    result = tl.sum(acc, 1) * tl.load(scales + output, mask=exists, other=0.0)
    tl.store(y + output, result.to(y.dtype.element_ty), mask=exists)


@jit
def _few_rows(
    x, codes, scales, y, rows, d_out, d_in,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, INPUTS: tl.constexpr, STAGES: tl.constexpr, WEIGHT_LEFT: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs), of all rows. WEIGHT_LEFT: the product is computed transposed."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    exists, given = output < d_out, row < rows
    codes += output.to(tl.int64)[:, None] * d_in
    x += row[:, None] * d_in
    acc = tl.zeros((OUTPUTS, ROWS) if WEIGHT_LEFT else (ROWS, OUTPUTS), tl.float32)
    for start in tl.range(0, d_in, INPUTS, num_stages=STAGES):
        inside = (start + column < d_in)[None, :]
        code = tl.load(codes + start + column[None, :], mask=exists[:, None] & inside, other=0.0)
        value = tl.load(x + start + column[None, :], mask=given[:, None] & inside, other=0.0)
        weight = code.to(tl.float32).to(value.dtype)  # exact in every dtype of activations
        if WEIGHT_LEFT:
            acc = tl.dot(weight, tl.trans(value), acc, input_precision="ieee")
        else:
            acc = tl.dot(value, tl.trans(weight), acc, input_precision="ieee")
    if WEIGHT_LEFT:
        acc = tl.trans(acc)
    result = acc * tl.load(scales + output, mask=exists, other=0.0)[None, :]
    at = row[:, None] * d_out + output[None, :]
    tl.store(y + at, result.to(y.dtype.element_ty), mask=given[:, None] & exists[None, :])
