"""Attention whose products are in float8, forward and backward: the operators and the backend. Named alone, since it changes
what a model computes: by some 5 to 7 % of the norm of its output and gradients.

The kernels are in float8_quantise.py and float8_kernels.py, their launches in float8_call.py.
"""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.attention.documents import documents
from llmtrain.kernels.attention.float8_call import Float8Call
from llmtrain.kernels.attention.float8_quantise import BLOCK
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.attention.triton import TritonContext
from llmtrain.kernels.launch import cdiv
from llmtrain.kernels.operators import operator, register_autograd
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> Any:
    return Float8Attention(spec)


class Float8Attention:
    def __init__(self, spec: AttentionSpec):
        self.spec, self.slopes = spec, Slopes(spec)

    def prepare(self, seq_len: int, device: torch.device, ids: Tensor | None = None) -> TritonContext:
        """ids: [batch, T], the document of each token of a packed batch; None: one document per sequence."""
        return TritonContext(self.slopes.on(device), None if ids is None else documents(ids))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: TritonContext) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k, v: [batch, T, n_kv_heads, head_dim] -> like q, contiguous."""
        starts, ends = (None, None) if context.packed is None else (context.packed.starts, context.packed.ends)
        settings = (self.spec.scale, self.spec.sliding_window, context.slopes, starts, ends)
        return _forward_op(q, k, v, *settings)[0]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None, slopes: Tensor | None, starts: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return Float8Call(q, k, v, scale, window, slopes, starts, ends).forward()


_forward_op = operator("attention_float8_forward", launch_forward, replayed=True)


@torch.library.register_fake(_forward_op)
def _(q, k, v, scale, window, slopes, starts, ends):
    stats = q.new_empty((q.shape[0], q.shape[2], cdiv(q.shape[1], BLOCK) * BLOCK), dtype=torch.float32)
    return q.new_empty(q.shape), stats, torch.empty_like(stats)


def launch_backward(
    dout: Tensor, out: Tensor, row_max: Tensor, row_inverse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float,
    window: int | None, slopes: Tensor | None, starts: Tensor | None, ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return Float8Call(q, k, v, scale, window, slopes, starts, ends).backward(out, row_max, row_inverse, dout)


_backward_op = operator("attention_float8_backward", launch_backward, replayed=True)


@torch.library.register_fake(_backward_op)
def _(dout, out, row_max, row_inverse, q, k, v, scale, window, slopes, starts, ends):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, scale, window, slopes, starts, ends = inputs
    ctx.save_for_backward(*output, q, k, v, slopes, starts, ends)
    ctx.settings = (scale, window)
    ctx.set_materialize_grads(False)  # those of the statistics are None


def _backward(ctx: Any, dout: Tensor | None, *of_statistics: None) -> tuple[Tensor | None, ...]:
    *kept, slopes, starts, ends = ctx.saved_tensors
    if dout is None:
        return (None,) * 8
    return (*_backward_op(dout, *kept, *ctx.settings, slopes, starts, ends), *(None,) * 5)


register_autograd(_forward_op, _backward, _setup_context)
