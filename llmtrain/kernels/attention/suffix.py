"""Causal attention of a sequence's last tokens to all of it (train.parallel.context), by kernels for whole sequences.

All queries see the keys before the first of them, and their own keys causally: one call for each, whose results are put together
by their log-sum-exps, as FlashAttention-2 does with blocks (Dao, arXiv:2307.08691). With the log-sum-exp and the output of the
whole, the kernels' backward passes give each call's part of the gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operators import operator, register_autograd


class Kernel(Protocol):
    """Attention of queries [batch, Q, n_heads, head_dim] to keys and values [batch, K, n_kv_heads, head_dim], causal with K = Q, or
    of all to all."""

    square: bool
    """K is Q in every call."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool) -> tuple[Tensor, Tensor]:
        """Output like q, and log-sum-exp [batch, n_heads, Q] in fp32 or wider."""
        ...

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v. out, lse: of the whole, contiguous."""
        ...


@dataclass(frozen=True)
class AttentionScale:
    """Factor of the scores, and their softcap or None."""

    scale: float
    softcap: float | None


class SuffixAttention:
    """Attention of a suffix's queries. kernel: a name of `KERNELS`."""

    def __init__(self, spec: AttentionSpec, kernel: str):
        self.spec, self.kernel = spec, kernel

    def prepare(self, seq_len: int, device: torch.device, ids: None = None, queries: int | None = None) -> None:
        """queries: Q; None: all T. For a kernel with as many keys as queries, Q divides T, as segments of one length do."""
        assert ids is None and (seq_len % (queries or seq_len) == 0 or not KERNELS[self.kernel].square)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: None, sinks: Tensor | None = None) -> Tensor:
        """q: [batch, Q, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width]; sinks: [n_heads]
        -> [batch, Q, n_heads, width], contiguous."""
        return _forward_op(q, k, v, sinks, self.spec.scale, self.spec.softcap, self.kernel)[0]


def _calls(kernel: Kernel, queries: int, keys: int) -> Iterator[tuple[slice, bool]]:
    """The keys of each call, and whether it is the causal one, which comes first."""
    before = keys - queries
    yield slice(before, keys), True
    step = queries if kernel.square else max(before, 1)
    for at in range(0, before, step):
        yield slice(at, at + step), False


def _forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, kernel: str
) -> tuple[Tensor, Tensor]:
    one, how = KERNELS[kernel], AttentionScale(scale, softcap)
    whole: tuple[Tensor, Tensor] | None = None
    for at, causal in _calls(one, q.shape[1], k.shape[1]):
        part = one.forward(q, k[:, at], v[:, at], how, causal)
        whole = part if whole is None else merged(*whole, *part)
    assert whole is not None
    out, lse = whole if sinks is None else with_sinks(*whole, sinks)
    return out.to(q.dtype).contiguous(), lse.contiguous()


def merged(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Output [batch, Q, n_heads, head_dim] and log-sum-exp [batch, n_heads, Q] over the keys of two calls, both in the type of
    the log-sum-exps."""
    return (_compiled_merge() if out.is_cuda else _merge)(out, lse, part, part_lse)


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    weight = torch.sigmoid(part_lse - lse).transpose(1, 2)[..., None]
    wide, part = out.to(lse.dtype), part.to(lse.dtype)
    return wide + weight * (part - wide), torch.logaddexp(lse, part_lse)


@functools.cache
def _compiled_merge() -> Any:
    return torch.compile(_merge, dynamic=False)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp, as `merged`'s, with one more score of each head, which has no value. sinks: [n_heads]."""
    sink = sinks.to(lse.dtype)[:, None].expand_as(lse)
    return out.to(lse.dtype) * torch.sigmoid(lse - sink).transpose(1, 2)[..., None], torch.logaddexp(lse, sink)


def sinks_gradient(sinks: Tensor | None, lse: Tensor, delta: Tensor) -> Tensor:
    """Gradient of sinks [n_heads] in their type; empty without. lse: with them; delta: rowsum(dout * out) - dlse, like lse."""
    if sinks is None:
        return lse.new_empty(0)
    return -(torch.exp(sinks.to(lse.dtype)[:, None] - lse) * delta).sum((0, 2)).to(sinks.dtype)


_forward_op = operator("attention_suffix", _forward)


@torch.library.register_fake(_forward_op)
def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes of the output and its log-sum-exp."""
    batch, queries, n_heads, _head_dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty((batch, n_heads, queries), dtype=wide)


def _gradients(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    scale: float, softcap: float | None, kernel: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    one, how = KERNELS[kernel], AttentionScale(scale, softcap)
    dk, dv = k.new_empty(k.shape), v.new_empty(v.shape)
    dq: Tensor | None = None
    for at, causal in _calls(one, q.shape[1], k.shape[1]):
        part, dk[:, at], dv[:, at] = one.backward(dout, out, lse, q, k[:, at], v[:, at], how, causal)
        dq = part if dq is None else dq.to(lse.dtype) + part
    assert dq is not None
    return dq.to(q.dtype).contiguous(), dk, dv, sinks_gradient(sinks, lse, delta_of(dout, out, lse, sinks))


def delta_of(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """rowsum(dout * out), like lse; not computed without sinks, whose gradient alone needs it here."""
    return lse if sinks is None else (dout.to(lse.dtype) * out).sum(-1).transpose(1, 2)


_backward_op = operator("attention_suffix_backward", _gradients)


@torch.library.register_fake(_backward_op)
def fake_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *_: Any
) -> tuple[Tensor, ...]:
    """Shapes of the gradients of q, k, v and sinks."""
    of_sinks = lse.new_empty(0) if sinks is None else sinks.new_empty(sinks.shape)
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape), of_sinks


def save_for_backward(ctx: Any, inputs: tuple, output: tuple[Tensor, Tensor]) -> None:
    """Keep the output, its log-sum-exp, q, k, v and sinks; ctx.settings are the other inputs."""
    q, k, v, sinks, *ctx.settings = inputs
    ctx.save_for_backward(*output, q, k, v, sinks)
    ctx.mark_non_differentiable(output[1])


def gradients_of(backward: Any) -> Any:
    """The derivative of a forward operator whose inputs are q, k, v, sinks and others, by its backward operator."""

    def gradients(ctx: Any, dout: Tensor, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors
        *of_qkv, of_sinks = backward(dout, *saved, *ctx.settings)
        return (*of_qkv, None if saved[-1] is None else of_sinks, *[None] * len(ctx.settings))

    return gradients


register_autograd(_forward_op, gradients_of(_backward_op), save_for_backward)


class _CuDNN:
    square = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool) -> tuple[Tensor, Tensor]:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention
        out, lse, *_ = op(*_heads_first(q, k, v), None, True, 0.0, causal, False, scale=how.scale)
        return out.transpose(1, 2), lse.flatten(2)

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool
    ) -> tuple[Tensor, ...]:
        op = torch.ops.aten._scaled_dot_product_cudnn_attention_backward
        seed = torch.zeros((), dtype=torch.int64, device=q.device)  # of dropout, which is 0
        shared = (lse[..., None], seed, seed, None, None, None, q.shape[1], k.shape[1], 0.0, causal)
        dout, q, k, v, out = _heads_first(dout, q, k, v, out)
        return _heads_first(*op(dout, q, k, v, out, *shared, scale=how.scale))


class _CPU:
    square = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool) -> tuple[Tensor, Tensor]:
        group = q.shape[2] // k.shape[2]
        q, k, v = _heads_first(q, k.repeat_interleave(group, 2), v.repeat_interleave(group, 2))
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal, scale=how.scale)
        return out.transpose(1, 2), lse

    def backward(
        self, dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, how: AttentionScale, causal: bool
    ) -> tuple[Tensor, ...]:
        op, n_kv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward, k.shape[2]
        group = q.shape[2] // n_kv
        k, v = k.repeat_interleave(group, 2), v.repeat_interleave(group, 2)
        dout, q, k, v, out = _heads_first(dout, q, k, v, out)
        dq, dk, dv = _heads_first(*op(dout, q, k, v, out, lse, 0.0, causal, scale=how.scale))
        return dq, *(t.unflatten(2, (n_kv, group)).sum(3) for t in (dk, dv))


KERNELS: dict[str, Any] = {"cudnn": _CuDNN(), "cpu": _CPU()}
"""By the name that the operators take. Kernels elsewhere add themselves."""


def _heads_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    """[batch, T, heads, head_dim] -> [batch, heads, T, head_dim], or back."""
    return tuple(t.transpose(1, 2) for t in tensors)
