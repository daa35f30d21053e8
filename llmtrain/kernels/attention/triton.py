"""FlashAttention-2 in Triton for NVIDIA and AMD, forward and backward: the operators and the backend.

The kernels are in triton_forward.py and triton_backward.py, their launches in triton_call.py.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.attention import suffix
from llmtrain.kernels.attention.documents import Documents, documents
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.attention.triton_call import Call
from llmtrain.kernels.attention.triton_select import takes_any_length, variant_name
from llmtrain.kernels.operators import call, operator, register_autograd
from llmtrain.kernels.platform import Platform

WHOLE = 128
"""Tokens that are whole tiles of every row of the tables."""


@dataclass(frozen=True)
class TritonContext:
    """slopes: ALiBi's, [n_heads] in fp32. packed: documents that must not see each other. added: tokens to a sequence."""

    slopes: Tensor | None
    packed: Documents | None
    added: int = 0


def build(spec: AttentionSpec, platform: Platform, variant: str) -> Any:
    return suffix.SuffixAttention(spec, "triton") if spec.lower_right else TritonAttention(spec, platform)


class TritonAttention:
    """Attention of whole tiles: where T is not a multiple of WHOLE, on GPUs, tokens are added at the end, which no other sees,
    unless TMA loads all tiles: others with an edge take two to four times as long."""

    def __init__(self, spec: AttentionSpec, platform: Platform):
        self.spec, self.slopes, self.platform = spec, Slopes(spec), platform

    def _added(self, seq_len: int, packed: bool) -> int:
        """Tokens that a sequence lacks of whole tiles, where it is to have them."""
        spec, added = self.spec, -seq_len % WHOLE
        if not added or self.platform.vendor == "cpu":
            return 0
        reach = min(spec.sliding_window or seq_len, seq_len)
        variant = variant_name(spec.alibi_max_bias is not None, packed, spec.softcap is not None, reach < seq_len)
        shape = (spec.head_dim, spec.dtype, self.platform, reach, variant, spec.n_heads > spec.n_kv_heads)
        return 0 if takes_any_length(*shape, spec.value_dim) else added

    def prepare(self, seq_len: int, device: torch.device, ids: Tensor | None = None) -> TritonContext:
        """ids: [batch, T], the document of each token of a packed batch (see documents.py); None: one document per sequence."""
        added = self._added(seq_len, ids is not None)
        if ids is not None and added:
            ids = F.pad(ids, (0, added), value=-1)
        return TritonContext(self.slopes.on(device), None if ids is None else documents(ids), added)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: TritonContext, sinks: Tensor | None = None) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width]; sinks: [n_heads]
        -> [batch, T, n_heads, width], contiguous within a sequence."""
        spec, packed, seq_len = self.spec, context.packed, q.shape[1]
        if added := context.added:
            q, k, v = (F.pad(t, (0, 0, 0, 0, 0, added)) for t in (q, k, v))
        out, _ = attend(
            q, k, v, spec.scale, window=spec.sliding_window, softcap=spec.softcap, slopes=context.slopes, packed=packed,
            sinks=sinks,
        )  # fmt: skip
        return out[:, :seq_len] if added else out


def attend(
    q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool = True, window: int | None = None,
    softcap: float | None = None, slopes: Tensor | None = None, packed: Documents | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention and the natural log-sum-exp of its scores, both differentiable by q, k, v and sinks.

    q: [batch, T, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width], any strides (best
    with 1 in the last dim); slopes: [n_heads] in fp32; sinks: [n_heads], a further score of each head. The score of
    AttentionSpec; without `causal` the distance |i - j| takes the place of i - j in ALiBi and in the window. Returns
    [batch, T, n_heads, width], contiguous, and [batch, n_heads, T] in fp32; for a query that sees nothing (padding) zeros
    and -inf, or the sink.
    """
    starts, ends = (None, None) if packed is None else (packed.starts, packed.ends)
    sinks = None if sinks is None else sinks.float()
    return call(_forward_op, q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks)


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool, window: int | None, softcap: float | None,
    slopes: Tensor | None, starts: Tensor | None, ends: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return Call(q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks).forward()


_forward_op = operator("attention_forward", launch_forward, replayed=True)


@torch.library.register_fake(_forward_op)
def _(q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks):
    batch, seq_len, n_heads, _ = q.shape
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((batch, n_heads, seq_len), dtype=torch.float32)


def launch_backward(
    dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float,
    causal: bool, window: int | None, softcap: float | None, slopes: Tensor | None, starts: Tensor | None,
    ends: Tensor | None, sinks: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return Call(q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks).backward(out, lse, dout, dlse)


_backward_op = operator("attention_backward", launch_backward, replayed=True)


@torch.library.register_fake(_backward_op)
def _(dout, dlse, out, lse, q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks):
    of_sinks = lse.new_empty(0 if sinks is None else sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def _setup_context(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    q, k, v, scale, causal, window, softcap, slopes, starts, ends, sinks = inputs
    ctx.save_for_backward(*output, q, k, v, slopes, starts, ends, sinks)
    ctx.settings = (scale, causal, window, softcap)
    ctx.set_materialize_grads(False)  # the gradient of lse is rarely used


def _backward(ctx: Any, dout: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
    out, lse, q, k, v, slopes, starts, ends, sinks = ctx.saved_tensors
    if dout is None and dlse is None:
        return (None,) * 11
    dout = torch.zeros_like(out) if dout is None else dout
    *gradients, of_sinks = call(_backward_op, dout, dlse, out, lse, q, k, v, *ctx.settings, slopes, starts, ends, sinks)
    return (*gradients, *(None,) * 7, None if sinks is None else of_sinks)


register_autograd(_forward_op, _backward, _setup_context)


class _Suffix:
    square = True

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, how: suffix.AttentionScale, causal: bool
    ) -> tuple[Tensor, Tensor]:
        return Call(q, k, v, how.scale, causal, softcap=how.softcap).forward()

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, how: suffix.AttentionScale,
        causal: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        return Call(q, k, v, how.scale, causal, softcap=how.softcap).backward(out, lse, dout)[:3]


suffix.KERNELS["triton"] = _Suffix()
