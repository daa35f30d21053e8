"""The cells of attention: ours beside FlashAttention-2, cuDNN, FlexAttention and what else is installed."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.attention_shape import AttentionShape
from llmtrain.bench.kernels.backends import backends
from llmtrain.bench.kernels.cell import Bar, Cell, Contender, Work, device, leaf
from llmtrain.bench.tune.attention import Case
from llmtrain.kernels import platform, registry

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
        case.seq_len, ("out", "dq", "dk", "dv"), inputs, lambda: _contenders(case), case.exact,
        Work(case.flops(), 2 * q + 2 * kv), Work(2.5 * case.flops(), 4 * q + 4 * kv), bars,
        lambda found: [case.first_group(t) for t in found],
    )  # fmt: skip


def shape_cell(shape: AttentionShape, names: Sequence[str]) -> Cell:
    """Backends by name at any shape, without bars."""
    spec, size = shape.spec, 2 if shape.spec.dtype != "float32" else 4

    def inputs(seed: int) -> tuple[list[Tensor], Tensor]:
        qkv, dout = shape.tensors(device(), seed)
        return [leaf(t) for t in qkv], dout

    tokens = shape.batch * shape.seq_len
    q, kv = (tokens * heads * spec.head_dim * size for heads in (spec.n_heads, spec.n_kv_heads))
    return Cell(
        "attention", shape.label, shape.seq_len, ("out", "dq", "dk", "dv"), inputs,
        lambda: [Contender(name, lambda name=name: _function(shape, name), name != "triton") for name in names],
        shape.exact, Work(shape.flops(), 2 * q + 2 * kv), Work(2.5 * shape.flops(), 4 * q + 4 * kv), (),
        lambda found: [shape.first_group(t) for t in found],
    )  # fmt: skip


def _contenders(case: Case) -> list[Contender]:
    names = backends("attention", case.spec)
    if device() == "cuda":
        names.remove("reference")  # stores T x T scores in fp32
    if case.variant == "documents":
        names = ["triton", "flex", "varlen"]  # the others do not take documents
    return [
        Contender(name, lambda name=name: _function(case, name), name not in ("triton", "reference", "sdpa:cpu"))
        for name in names
    ]


def _function(case: Case | AttentionShape, name: str) -> Callable[..., Tensor]:
    here = platform.detect()
    kernel: Any = registry.resolve("attention", name, case.spec, here).build(case.spec, here)
    context = kernel.prepare(case.seq_len, torch.device(device()), case.ids(device()))
    return lambda q, k, v: kernel(q, k, v, context)
