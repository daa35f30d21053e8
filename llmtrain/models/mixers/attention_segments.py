"""Causal attention over segments of sequences that ranks share, as one operator: keys and values travel beside a rank's own work.

A segment's queries see their own keys causally and all keys of earlier segments: a call of a kernel for each, put together by
their log-sum-exps (kernels/attention/suffix.py). Only this rank's keys and values are saved for the backward, which gathers
the others' again, and sums their gradients over the ranks beside its last calls.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName

from llmtrain.kernels.attention import suffix
from llmtrain.kernels.attention.suffix import KERNELS, AttentionScale, SuffixAttention, merged, with_sinks
from llmtrain.kernels.operators import operator, register_autograd
from llmtrain.models.segments import ContextParallelRanks

OPERATOR = "llmtrain.segment_attention.default"


def segment_attention(
    kernel: SuffixAttention,
    segments: ContextParallelRanks,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None = None,
) -> Tensor:
    """q: [batch, 2 * n, n_heads, head_dim], of this rank's two segments; k, v: [batch, 2 * n, n_kv_heads, head_dim]; sinks:
    [n_heads] -> like q, contiguous."""
    spec, ranks = kernel.spec, (segments.rank, segments.size, segments.group)
    return segment_attention_forward(q, k, v, sinks, spec.scale, spec.softcap, kernel.kernel, *ranks)[0]


def launch_forward(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, softcap: float | None, kernel: str, rank: int,
    size: int, group: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output, and the log-sum-exp, [batch, n_heads, 2 * n] in fp32 or wider."""
    one, how = KERNELS[kernel], AttentionScale(scale, softcap)
    segments = ContextParallelRanks(rank, size, GroupName(group))
    everyones = _gathering(segments, k, v)
    queries, keys, values = (segments.halves(t) for t in (q, k, v))
    found = [one.forward(queries[i], keys[i], values[i], how, True) for i in range(2)]
    found[1] = merged(*found[1], *one.forward(queries[1], keys[0], values[0], how, False))
    theirs = everyones()
    for i, slot in _of_others(segments):
        found[i] = merged(*found[i], *one.forward(queries[i], theirs[0][:, slot], theirs[1][:, slot], how, False))
    found = found if sinks is None else [with_sinks(*part, sinks) for part in found]
    out = torch.cat([out.to(q.dtype) for out, _ in found], dim=1)
    return out.contiguous(), torch.cat([lse for _, lse in found], dim=2)


segment_attention_forward = operator("segment_attention", launch_forward)
torch.library.register_fake(segment_attention_forward, suffix.fake_forward)


def launch_backward(
    dout: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    scale: float, softcap: float | None, kernel: str, rank: int, size: int, group: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of q, k, v and sinks."""
    one, how = KERNELS[kernel], AttentionScale(scale, softcap)
    segments = ContextParallelRanks(rank, size, GroupName(group))
    everyones = _gathering(segments, k, v)
    outs, log_sums = segments.halves(out), [t.contiguous() for t in lse.chunk(2, dim=2)]
    queries, keys, values, douts = (segments.halves(t) for t in (q, k, v, dout))
    dq = [torch.zeros(t.shape, dtype=lse.dtype, device=t.device) for t in queries]

    def backward(i: int, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        of_query, *found = one.backward(douts[i], outs[i].contiguous(), log_sums[i], queries[i], k, v, how, causal)
        dq[i] += of_query
        return found[0], found[1]

    own_first, own_second = (backward(i, keys[i], values[i], True) for i in range(2))
    theirs = everyones()
    sums = [torch.zeros_like(t) for t in theirs]  # [batch, count, n, n_kv_heads, head_dim]
    for i, slot in _of_others(segments):
        for total, part in zip(sums, backward(i, theirs[0][:, slot], theirs[1][:, slot], False), strict=True):
            total[:, slot] += part
    del theirs
    received = [segments.summing(total) for total in sums]
    crossing = backward(1, keys[0], values[0], False)  # beside the exchange
    found = []
    for first, across, second, others in zip(own_first, crossing, own_second, received, strict=True):
        own = others().unflatten(0, (-1, 2))
        own[:, 0] += first + across
        own[:, 1] += second
        found.append(own.flatten(1, 2))
    of_sinks = suffix.sinks_gradient(sinks, lse, suffix.delta_of(dout, out, lse, sinks))
    return torch.cat([t.to(q.dtype) for t in dq], dim=1), *found, of_sinks


segment_attention_backward = operator("segment_attention_backward", launch_backward)
torch.library.register_fake(segment_attention_backward, suffix.fake_backward)


_backward = suffix.gradients_of(segment_attention_backward)
register_autograd(segment_attention_forward, _backward, suffix.save_for_backward)


def _gathering(segments: ContextParallelRanks, k: Tensor, v: Tensor) -> Callable[[], list[Tensor]]:
    """Begin to gather keys and values; by a call of the result each [batch, count, n, n_kv_heads, head_dim]."""
    begun = [segments.gathering(segments.fold(t)) for t in (k, v)]
    return lambda: [wait() for wait in begun]


def _of_others(segments: ContextParallelRanks) -> list[tuple[int, int]]:
    """(which of the own segments, slot of an earlier segment that another rank holds), for each such call."""
    own = range(segments.own_slots.start, segments.own_slots.stop)
    return [
        (i, slot)
        for slot, place in enumerate(segments.slots)
        for i, own_place in enumerate(segments.own)
        if place < own_place and slot not in own
    ]
