"""Products of few rows with weights in 8 bits, in Triton: codes are read as they are stored and widened in registers.

Decoding multiplies each weight by one number per row of the batch, so it takes what reading the weights takes; a widened copy,
which cuBLAS would need, is read and written beside them. Sums are in fp32 and scaled at their end. Where a weight has too few rows
to keep a GPU busy, several programs share them, each with some of the columns, and a second kernel adds their sums up in order. A
row's result depends on nothing but the row and the number of rows.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.operators import operator


class Tile(NamedTuple):
    """outputs: rows of the weight in a program. inputs: columns of it that are read at a time. least: columns that a program has at
    least where several share the rows."""

    outputs: int
    inputs: int
    num_warps: int
    num_stages: int = 1
    least: int = 0


ONE_ROW = Tile(2, 1024, 2)
FEW_ROWS = Tile(32, 256, 4, 4, 2048)
MORE_ROWS = Tile(32, 128, 4, 3, 512)
LARGE = Tile(64, 128, 8, 3, 512)
"""Of one row, up to 16, and more, for weights of up to LARGE_CODES and larger ones: the fastest of those measured over
Llama-3.2-1B's products at 1 row (H100), 16, 32 and 64 rows (H200)."""
LARGE_CODES, PROGRAMS, MOST_SPLITS = 1 << 23, 256, 8
SUMS = 1024
"""Outputs of a program that adds up."""


def tile_and_splits(rows: int, d_out: int, d_in: int) -> tuple[Tile, int]:
    """The tile of a product of several rows, and the number of programs that share the columns of each tile: enough for two
    programs on each of an H200's multiprocessors."""
    tile = FEW_ROWS if rows <= 16 else MORE_ROWS if d_out * d_in <= LARGE_CODES else LARGE
    splits = next_power_of_2(cdiv(PROGRAMS, cdiv(d_out, tile.outputs)))
    return tile, max(1, min(splits, d_in // tile.least, MOST_SPLITS))


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
        tile, splits = tile_and_splits(rows, d_out, d_in)
        sums = y if splits == 1 else x.new_empty((splits, rows, d_out), dtype=torch.float32)
        _few_rows[(cdiv(d_out, tile.outputs), splits)](
            *(x, codes, scales, sums, rows, d_out, d_in),
            ROWS=max(16, next_power_of_2(rows)),  # 16: what a matrix instruction takes
            OUTPUTS=tile.outputs,
            INPUTS=tile.inputs,
            STAGES=tile.num_stages if rows <= 16 or x.itemsize < 4 else 2,  # what fits shared memory
            WEIGHT_LEFT=codes.dtype != torch.int8 and rows <= 32,  # measured; each is slower for the others
            SPLITS=splits,
            num_warps=tile.num_warps,
        )
        if splits > 1:
            _add_up[(rows, cdiv(d_out, SUMS))](sums, scales, y, rows, d_out, SPLITS=splits, OUTPUTS=SUMS, num_warps=4)
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
    SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part of the inputs), of all rows. y: [SPLITS, rows, d_out] of sums where there are several parts.
    WEIGHT_LEFT: the product is computed transposed."""
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    row, column = tl.arange(0, ROWS), tl.arange(0, INPUTS)
    exists, given = output < d_out, row < rows
    codes += output.to(tl.int64)[:, None] * d_in
    x += row[:, None] * d_in
    part = tl.program_id(1)
    share = tl.cdiv(tl.cdiv(d_in, INPUTS), SPLITS) * INPUTS
    acc = tl.zeros((OUTPUTS, ROWS) if WEIGHT_LEFT else (ROWS, OUTPUTS), tl.float32)
    for start in tl.range(part * share, tl.minimum(part * share + share, d_in), INPUTS, num_stages=STAGES):
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
    if SPLITS == 1:
        acc *= tl.load(scales + output, mask=exists, other=0.0)[None, :]
    at = (part * rows + row)[:, None] * d_out + output[None, :]
    tl.store(y + at, acc.to(y.dtype.element_ty), mask=given[:, None] & exists[None, :])


@jit
def _add_up(sums, scales, y, rows, d_out, SPLITS: tl.constexpr, OUTPUTS: tl.constexpr):
    """Program (row, tile of outputs): y from the sums of all parts."""
    row, output = tl.program_id(0), tl.program_id(1) * OUTPUTS + tl.arange(0, OUTPUTS)
    exists = output < d_out
    total = tl.zeros((OUTPUTS,), tl.float32)
    for part in tl.static_range(SPLITS):
        total += tl.load(sums + (part * rows + row) * d_out + output, mask=exists, other=0.0)
    total *= tl.load(scales + output, mask=exists, other=0.0)
    tl.store(y + row * d_out + output, total.to(y.dtype.element_ty), mask=exists)
