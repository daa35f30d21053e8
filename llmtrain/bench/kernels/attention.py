"""The cells of attention: ours beside FlashAttention-2, cuDNN, FlexAttention and what else is installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.attention_peers import flex
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work, device, leaf, wide
from llmtrain.bench.tune.attention import Case
from llmtrain.kernels import platform, registry
from llmtrain.kernels.attention.reference import ReferenceAttention, score_bias
from llmtrain.kernels.attention.spec import AttentionSpec

LENGTHS = (2048, 4096, 8192)
_PLAIN = (Bar("sdpa:flash", "sum", 1.4), Bar("flex", "sum", 1.05), Bar("sdpa:flash", "memory", 1.0))
_OTHER = (Bar("flex", "sum", 1.2), Bar("flex", "memory", 1.0))


def cells(tiny: bool) -> Iterator[Cell]:
    """tiny: for a CPU, to show that it works."""
    if tiny:
        yield _cell(Case(32, 128, "plain", "float32", 256, heads=2), ())
        yield _cell(Case(32, 128, "alibi", "float32", 256, heads=2), ())
        return
    for head_dim in (64, 128):
        for seq_len in LENGTHS:
            yield _cell(Case(head_dim, seq_len), _PLAIN)
    others = [*itertools.product((64, 128), ("alibi", "window", "documents")), (160, "plain")]
    for (head_dim, variant), seq_len in itertools.product(others, LENGTHS):
        yield _cell(Case(head_dim, seq_len, variant), _OTHER)


def _cell(case: Case, bars: tuple[Bar, ...]) -> Cell:
    spec, size = case.spec, 2 if case.dtype != "float32" else 4

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        qkv, dout = case.tensors(device(), seed)
        return [leaf(t) for t in qkv], dout

    q = case.batch * case.seq_len * spec.n_heads * spec.head_dim * size
    kv = case.batch * case.seq_len * spec.n_kv_heads * spec.head_dim * size
    return Cell(
        "attention",
        f"head_dim {case.head_dim}" + f" {case.variant}" * (case.variant != "plain"),
        case.seq_len,
        ("out", "dq", "dk", "dv"),
        inputs,
        lambda: _contenders(case),
        lambda leaves, dout: _exact(case, leaves, dout),
        Work(case.flops(), 2 * q + 2 * kv),
        Work(2.5 * case.flops(), 4 * q + 4 * kv),
        bars,
        lambda found: _pieces(spec, found),
    )


def _contenders(case: Case) -> list[Contender]:
    spec, here = case.spec, platform.detect()
    names = [row.backend for row in registry.table("attention", spec, here) if row.reason is None]
    if here.vendor != "cpu":
        names.remove("reference")  # stores T x T scores in fp32
    if case.variant == "documents":
        names = ["triton", "flex"]  # the others do not take documents
    return [
        Contender(name, lambda name=name: _function(case, name), name not in ("triton", "reference", "sdpa:cpu"))
        for name in names
    ]


def _function(case: Case, name: str) -> Callable[..., Tensor]:
    spec, here, where = case.spec, platform.detect(), torch.device(device())
    if name == "flex":
        return flex(spec, case.seq_len, case.ids(device()))
    kernel: Any = registry.resolve("attention", name, spec, here).build(spec, here)
    if name == "triton":
        context = kernel.prepare(case.seq_len, where, case.ids(device()))
    else:
        context = kernel.prepare(case.seq_len, where)
    return lambda q, k, v: kernel(q, k, v, context)


def _pieces(spec: AttentionSpec, found: Sequence[Tensor]) -> list[Tensor]:
    """Slices of the last sequence's first key head and of the query heads that share it."""
    group = spec.n_heads // spec.n_kv_heads
    out, dq, dk, dv = found
    return [out[-1:, :, :group], dq[-1:, :, :group], dk[-1:, :, :1], dv[-1:, :, :1]]


def _exact(case: Case, leaves: list[Tensor], dout: Tensor) -> list[Tensor]:
    spec, group, ids = case.spec, case.spec.n_heads // case.spec.n_kv_heads, case.ids(device())
    bias = score_bias(spec, case.seq_len, dout.device)[:group]
    if ids is not None:
        bias = bias.masked_fill(ids[-1][:, None] != ids[-1][None, :], float("-inf"))
    q, k, v = leaves
    q, k, v = pieces = wide([q[-1:, :, :group], k[-1:, :, :1], v[-1:, :, :1]])
    one = AttentionSpec(group, 1, spec.head_dim, spec.scale, softcap=spec.softcap, dtype="float64")
    out = ReferenceAttention(one)(q, k, v, bias)
    return [out.detach(), *torch.autograd.grad(out, pieces, dout[-1:, :, :group].double())]
