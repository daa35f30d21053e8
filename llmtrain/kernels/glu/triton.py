"""The gradient of gated linear units in Triton: gate, up and the gradient of the result are read once, both gradients written into
the halves of one matrix.

PyTorch's compiler computes that matrix element by element, at each of which it evaluates what both halves need: arithmetic then
takes longer than the memory. The forward pass it fuses well, so that stays its own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.glu import reference
from llmtrain.kernels.glu.reference import Activation
from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.operators import operator
from llmtrain.kernels.sigmoid import sigmoid

BLOCK, NUM_WARPS = 1024, 4


def glu(h: Tensor, activation: Activation) -> Tensor:
    """The reference, whose gradient is one kernel's, computed in fp32."""
    return _GLU.apply(h, activation)


class _GLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, activation: Activation) -> Tensor:
        ctx.save_for_backward(h)
        ctx.activation = activation
        return reference.glu(h, activation)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (h,) = ctx.saved_tensors
        return glu_bwd(dy, h, ctx.activation), None


def launch_bwd(dy: Tensor, h: Tensor, activation: str) -> Tensor:
    """reference.glu_bwd; the result is contiguous."""
    d_h = torch.empty(h.shape, dtype=h.dtype, device=h.device)
    width = h.shape[-1] // 2
    assert dy.shape == (*h.shape[:-1], width) and dy.dtype == h.dtype
    rows = h.numel() // max(h.shape[-1], 1)
    if rows and width:
        _glu_bwd[rows, cdiv(width, BLOCK)](
            *(dy.contiguous(), h.contiguous(), d_h, width), ACTIVATION=activation, BLOCK=BLOCK, num_warps=NUM_WARPS
        )
    return d_h


glu_bwd = operator("glu_bwd", launch_bwd, replayed=True)


@torch.library.register_fake(glu_bwd)
def _(dy, h, activation):
    return h.new_empty(h.shape)


@jit
def _glu_bwd(dy, h, d_h, width, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, tile of its columns)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    to_gate = row * (2 * width) + column
    gate = tl.load(h + to_gate, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(h + to_gate + width, mask=inside, other=0.0).to(tl.float32)
    d = tl.load(dy + row * width + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION == "silu":
        act, slope = _silu(gate)
    elif ACTIVATION == "gelu":
        act, slope = _gelu(gate)
    else:
        act, slope = _gelu_tanh(gate)
    tl.store(d_h + to_gate, (d * up * slope).to(d_h.dtype.element_ty), mask=inside)
    tl.store(d_h + to_gate + width, (d * act).to(d_h.dtype.element_ty), mask=inside)


@triton.jit
def _silu(x):
    """silu(x) and its slope."""
    s = sigmoid(x)
    return x * s, s + x * s * (1.0 - s)


@triton.jit
def _gelu(x):
    cdf = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    return x * cdf, cdf + x * 0.3989422804014327 * tl.exp2(x * x * -0.7213475204444817)


@triton.jit
def _gelu_tanh(x):
    """The same of the approximation with tanh: (1 + tanh(z)) / 2 = sigmoid(2 z)."""
    s = sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    return x * s, s + x * s * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * x * x)
