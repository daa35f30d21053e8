"""Attention's backward pass by stored gradients of scores, for wide heads and long sequences: five products instead of seven.

The sums of dq, dk and dv in registers (triton_backward.py) leave wide heads small tiles, and neither kernel can use the other's
scores. Here one kernel computes dv and stores dS^T, a chunk of keys and queries at a time; cuBLAS, whose tiles are as wide as a
head, multiplies dk = dS^T Q and dq = dS K. Sums over chunks are in fp32. Each element has one writer at a time: deterministic.

A chunk on the diagonal is multiplied whole though half of it is zeros: it has few keys, of as many heads as fill a GPU.
"""

from collections.abc import Iterator
from typing import Protocol

import torch
from torch import Tensor

from llmtrain.kernels.attention.triton_dscores import attention_delta, attention_dv_dscores
from llmtrain.kernels.attention.triton_launch import StoredLaunch
from llmtrain.kernels.attention.triton_select import LOG2_E
from llmtrain.kernels.attention.triton_tiles import parts_of
from llmtrain.kernels.launch import Descriptor, cdiv
from llmtrain.kernels.platform import Platform

DELTA_ROWS = 64
LEAST_KEYS, MOST_KEYS = 1024, 4096
"""Keys of a chunk with causality: dq's sum is read and written once a chunk, and a chunk's last corner is multiplied in vain."""


class Call(Protocol):
    """The fields of triton.Call that are read here."""

    q: Tensor
    k: Tensor
    v: Tensor
    batch: int
    seq_len: int
    n_heads: int
    group: int
    head_dim: int
    value_dim: int
    scale: float
    causal: bool
    softcap: float | None
    slopes: Tensor | None
    platform: Platform


def chunks(seq_len: int, keys: int, queries: int, causal: bool) -> Iterator[tuple[slice, list[slice]]]:
    """Chunks of at most `keys` keys, each with the queries that see them, in chunks of at most `queries`."""
    for first in range(0, seq_len, keys):
        begin = first if causal else 0
        seen = [slice(at, min(at + queries, seq_len)) for at in range(begin, seq_len, queries)]
        yield slice(first, min(first + keys, seq_len)), seen


def shares(launch: StoredLaunch, n_heads: int, group: int, seq_len: int, causal: bool) -> tuple[int, int]:
    """Query heads of a chunk, in whole groups that share keys, and its keys, in whole tiles.

    With causality few keys: of the last chunk's scores half are multiplied though nothing sees them.
    """
    tile = launch.tile
    keys = min(launch.keys, max(min(seq_len // 8, MOST_KEYS), LEAST_KEYS)) if causal else launch.keys
    keys = min(keys, seq_len)
    heads = min(group * max(1, launch.rows // keys // group), n_heads)
    return heads, max(min(keys, launch.rows // heads) // tile, 1) * tile


def fills(launch: StoredLaunch, n_heads: int, group: int, seq_len: int, causal: bool, num_sms: int) -> bool:
    """True if a chunk has a program for nine in ten multiprocessors."""
    heads, keys = shares(launch, n_heads, group, seq_len, causal)
    return heads * (keys // launch.block_n) >= 0.9 * num_sms


def backward(
    call: Call, launch: StoredLaunch, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv like q, k, v, contiguous. T: whole tiles (Call._stored)."""
    q, k, v = call.q, call.k, call.v
    delta = _delta(call, out, lse, dout, dlse)
    dq, dk, dv = (t.new_empty(t.shape) for t in (q, k, v))
    count, keys = shares(launch, call.n_heads, call.group, call.seq_len, call.causal)
    plan = list(chunks(call.seq_len, keys, launch.queries, call.causal))
    for batch in range(call.batch):
        for first in range(0, call.n_heads, count):
            last = min(first + count, call.n_heads)
            heads, kv_heads = slice(first, last), slice(first // call.group, last // call.group)
            inputs = [q[batch, :, heads], k[batch, :, kv_heads], v[batch, :, kv_heads], dout[batch, :, heads]]
            stats = lse[batch, heads], delta[batch, heads]
            slopes = None if call.slopes is None else call.slopes[heads]
            results = dq[batch, :, heads], dk[batch, :, kv_heads], dv[batch, :, kv_heads]
            _Heads(call, launch, inputs, stats, slopes, results).run(plan)
    return dq, dk, dv


def _delta(call: Call, out: Tensor, lse: Tensor, dout: Tensor, dlse: Tensor | None) -> Tensor:
    """rowsum(dout * out) - dlse, like lse."""
    assert out.is_contiguous() and lse.is_contiguous()
    delta = torch.empty_like(lse)
    dlse = None if dlse is None else dlse.contiguous()
    grid = (cdiv(call.seq_len, DELTA_ROWS), call.batch * call.n_heads)
    attention_delta[grid](
        out, dout, dlse, delta, *dout.stride()[:3], call.seq_len,
        N_HEADS=call.n_heads, VALUE_DIM=call.value_dim, VALUE_PARTS=parts_of(call.value_dim), BLOCK_M=DELTA_ROWS, num_warps=4,
    )  # fmt: skip
    return delta


class _Heads:
    """Some heads of one sequence: q, dout [T, heads, width]; k, v [T, kv_heads, width]; stats (lse, delta): [heads, T].
    results: dq, dk, dv, where they are written."""

    def __init__(
        self, call: Call, launch: StoredLaunch, inputs: list[Tensor], stats: tuple[Tensor, Tensor], slopes: Tensor | None,
        results: tuple[Tensor, Tensor, Tensor],
    ):  # fmt: skip
        self.call, self.launch, self.slopes = call, launch, slopes
        (self.q, self.k, self.v, self.dout), (self.lse, self.delta) = inputs, stats
        self.dq, self.dk, self.dv = results
        self.heads = self.q.shape[1]

    def run(self, plan: list[tuple[slice, list[slice]]]) -> None:
        call = self.call
        most = max(_length(keys) * _length(at) for keys, seen in plan for at in seen)
        stored = self.q.new_empty(self.heads * most)
        # [heads, T, head_dim]; in fp32 where several chunks add to it.
        dq = self.dq.transpose(0, 1) if len(plan) == 1 else self._sums(call.seq_len, call.head_dim)
        for keys, seen in plan:
            # Without sums over chunks or heads: where they belong.
            whole = len(seen) == 1 and call.group == 1
            parts = [
                t[keys].transpose(0, 1) if whole else self._sums(_length(keys), t.shape[2]) for t in (self.dk, self.dv)
            ]
            for number, at in enumerate(seen):
                dscores = stored[: self.heads * _length(keys) * _length(at)].view(
                    self.heads, _length(keys), _length(at)
                )
                self._dv_dscores(keys, at, dscores, parts[1], number > 0)
                _multiply(dscores, self.q[at].transpose(0, 1), parts[0], number > 0)
                keys_of_heads = self.k[keys].transpose(0, 1)
                _multiply(dscores.mT, keys_of_heads, dq[:, at], keys.start > 0, call.group)
            if not whole:
                for target, part in zip((self.dk, self.dv), parts, strict=True):
                    target[keys] = part.unflatten(0, (-1, call.group)).sum(1).transpose(0, 1)
        if len(plan) > 1:
            self.dq.copy_(dq.transpose(0, 1))

    def _sums(self, tokens: int, width: int) -> Tensor:
        return self.lse.new_empty((self.heads, tokens, width))

    def _dv_dscores(self, keys: slice, at: slice, dscores: Tensor, dv: Tensor, add: bool) -> None:
        call, launch = self.call, self.launch
        q, dout, k, v = self.q[at], self.dout[at], self.k[keys], self.v[keys]
        use_tma = call.platform.vendor == "nvidia" and launch.use_tma
        rows = [self.heads * _length(keys), _length(at)]
        target = Descriptor(dscores, rows, [rows[1], 1], [launch.block_n, launch.block_m]) if use_tma else dscores
        strides = [stride for t in (q, k, v, dout) for stride in t.stride()[:2]]
        softcap = None if call.softcap is None else call.softcap * LOG2_E
        # Without causality every key lies far enough behind: by the same code, whose second loop ptxas does not serialize.
        ahead = at.start - keys.start if call.causal else call.seq_len
        grid = (self.heads * (_length(keys) // launch.block_n),)
        attention_dv_dscores[grid](
            q, k, v, dout, self.lse[:, at], self.delta[:, at], target, dv, self.slopes,
            *strides, dv.stride(1), dv.stride(0), self.lse.stride(0),
            _length(at), _length(keys), self.heads, ahead, call.scale * LOG2_E, softcap, call.scale,
            GROUP=call.group, HEAD_DIM=call.head_dim, PARTS=parts_of(call.head_dim),
            VALUE_DIM=call.value_dim, VALUE_PARTS=parts_of(call.value_dim),
            BLOCK_M=launch.block_m, BLOCK_N=launch.block_n, NUM_STAGES=launch.num_stages,
            USE_TMA=use_tma, PRECISION="tf32x3" if call.platform.vendor == "nvidia" else "ieee", ADD=add,
            num_warps=launch.num_warps, num_stages=launch.num_stages,
        )  # fmt: skip


def _multiply(a: Tensor, b: Tensor, out: Tensor, add: bool, group: int = 1) -> None:
    """out (+)= a b. a: [heads, M, K]; b: [heads / group, K, N]; out: [heads, M, N], in their type or in fp32."""
    if out.device.type == "meta":  # kernels are compiled; a product with a sum in fp32 has no meta implementation
        return
    if group > 1:
        b = b[:, None].expand(-1, group, -1, -1).flatten(0, 1)
    if out.dtype == a.dtype:
        torch.baddbmm(out, a, b, out=out) if add else torch.bmm(a, b, out=out)
    elif add:
        torch.baddbmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.bmm(a, b, out_dtype=out.dtype, out=out)


def _length(at: slice) -> int:
    return at.stop - at.start
