"""Attention as tests, doctor, bench and tuning see it."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from llmtrain.errors import UserError
from llmtrain.kernels import operation as base
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.triton_select import variant_name
from llmtrain.kernels.operation import DOCUMENT, Draw, Function, Operation, Shape, Work

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "alibi": {"alibi_max_bias": 8.0},
    "documents": {"documents": True},
    "softcap": {"softcap": 30.0},
    "window": {"sliding_window": 1024},
    "documents+window": {"sliding_window": 1024, "documents": True},
    "softcap+window": {"softcap": 50.0, "sliding_window": 1024},
    # All at once.
    "mixed": {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0, "documents": True},
    "mixed, full": {"alibi_max_bias": 8.0, "sliding_window": 512, "softcap": 30.0, "documents": True},
    # The keys before those of a part of the queries (suffix.py).
    "plain, full": {},
}
"""Features by the name that rows of the tuning table have, causal but for those that end in `full`."""
OTHERS = (
    AttentionSpec(64, 8, 64, 64**-0.5, sinks=True),
    AttentionSpec(64, 8, 64, 64**-0.5, sliding_window=128, sinks=True),
    AttentionSpec(16, 16, 192, 192**-0.5, value_dim=128),
)
"""Layers of published models with what has no rows: sinks (gpt-oss), values of another width than keys (DeepSeek-V2-Lite)."""
_BLOCK = 2048
"""Queries whose scores in float64 exist at a time."""


class Attention(Operation):
    name, spec, leaves, outputs = "attention", AttentionSpec, ("q", "k", "v", "sinks"), ("out",)
    slow_reference = True

    def inputs(
        self, spec: AttentionSpec, batch: int, seq_len: int, device: str = "cpu", seed: int = 0,
        document: int = DOCUMENT,
    ) -> tuple[list[Any], Tensor]:  # fmt: skip
        """q, k, v [batch, T, heads, head_dim] as slices of one projection, and sinks [n_heads] where the spec has some. document:
        length of one, in `ids`."""
        draw, heads = Draw(device, spec.dtype, seed), (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        widths = [h * width for h, width in zip(heads, (spec.head_dim, spec.head_dim, spec.width), strict=True)]
        slices = draw(batch, seq_len, sum(widths)).split(widths, dim=-1)
        made: list[Any] = [t.unflatten(-1, (h, -1)) for t, h in zip(slices, heads, strict=True)]
        up = draw(batch, seq_len, spec.n_heads, spec.width)
        return made + ([draw(spec.n_heads)] if spec.sinks else []), up

    def bind(self, kernel: Any, shape: Shape, device: str) -> Function:
        context = kernel.prepare(shape.seq_len, torch.device(device), self.ids(shape, device))
        return lambda q, k, v, *sinks: kernel(q, k, v, context, *sinks)

    def pieces(self, shape: Shape, found: Sequence[Tensor]) -> list[Tensor]:
        """The last sequence's first key head, and the query heads that share it, with their sinks."""
        n = shape.spec.n_kv_heads
        return [t[: len(t) // n] if t.ndim == 1 else t[-1:, :, : t.shape[2] // n] for t in found]

    def exact(self, shape: Shape, tensors: Sequence[Any], up: Tensor) -> list[Tensor]:
        """Head by head, some queries at a time, so that a sequence of 32,768 tokens fits."""
        if self.full(shape):
            raise UserError(
                f"attention is checked with causality alone: tune `{(shape.variant or '').partition(',')[0]}`"
            )
        ids, n, sinks = self.ids(shape, up.device.type), shape.spec.n_kv_heads, [t.detach() for t in tensors[3:]]
        sinks = [t[: len(t) // n].double() for t in sinks]
        dsinks = [torch.zeros_like(t) for t in sinks]
        found: list[Tensor] = []
        # The gradient of a sink is of all sequences; of the rest the last is enough.
        for sequence in range(shape.batch) if sinks else (shape.batch - 1,):
            given = [t.detach()[sequence, :, : t.shape[2] // n] for t in (*tensors[:3], up)]
            q, k, v, dout = (t.transpose(0, 1).double() for t in given)
            found = [torch.zeros_like(t) for t in (dout, q, k, v)]
            out, dq, dk, dv = found
            for head, begin in itertools.product(range(len(q)), range(0, shape.seq_len, _BLOCK)):
                rows = slice(begin, min(begin + _BLOCK, shape.seq_len))
                own = [q[head, rows], k[0, : rows.stop], v[0, : rows.stop], *(t[head] for t in sinks)]
                leaves = base.leaves([t.clone() for t in own])
                part = _rows(shape.spec, head, begin, leaves, None if ids is None else ids[sequence])
                out[head, rows] = part.detach()
                dq[head, rows], d_k, d_v, *d_sinks = torch.autograd.grad(part, leaves, dout[head, rows])
                dk[0, : rows.stop] += d_k
                dv[0, : rows.stop] += d_v
                for total, grad in zip(dsinks, d_sinks, strict=True):
                    total[head] += grad
        return [*(t.transpose(0, 1)[None] for t in found), *dsinks]

    def work(self, shape: Shape) -> tuple[Work, Work]:
        """FLOP: 4 head_dim per visible pair and head, in the backward 2.5 times as many. Bytes: of q, k, v and the output; in
        the backward of these and of all gradients."""
        spec, causal, document = shape.spec, not self.full(shape), self.option(shape, "document", DOCUMENT)
        pairs = spec.pairs(shape.seq_len, causal)
        if spec.documents:
            whole, rest = divmod(shape.seq_len, document)
            pairs = whole * spec.pairs(document, causal) + spec.pairs(rest, causal)
        widths = spec.head_dim + spec.width
        flops, moved = 2.0 * pairs * spec.n_heads * widths * shape.batch, shape.batch * shape.seq_len * widths
        moved *= (spec.n_heads + spec.n_kv_heads) * base.element_size(spec.dtype)
        return Work(flops, moved), Work(2.5 * flops, 2 * moved)

    def label(self, shape: Shape) -> str:
        spec = shape.spec
        if shape.variant is not None:
            return f"head_dim {spec.head_dim}" + f" {shape.variant}" * (shape.variant != "plain")
        width = f"/{spec.width}" if spec.width != spec.head_dim else ""
        return f"{spec.n_heads} on {spec.n_kv_heads} x {spec.head_dim}{width} {features(spec)}"

    def shapes(self, tiny: bool) -> Iterator[Shape]:
        if tiny:
            yield self.sized(32, 128, "plain", "float32", 256, heads=2)
            yield self.sized(32, 128, "alibi", "float32", 256, heads=2)
            return
        others = [*itertools.product((64, 128), ("alibi", "window", "documents")), (160, "plain")]
        for head_dim, variant in [(64, "plain"), (128, "plain"), *others]:
            for seq_len in base.LENGTHS:
                yield self.sized(head_dim, seq_len, variant)
        for spec, seq_len in itertools.product(OTHERS, base.LENGTHS):
            yield Shape(spec, max(1, base.TOKENS // seq_len), seq_len)

    def selftests(self, dtype: str) -> Iterator[tuple[str, Shape]]:
        spec = AttentionSpec(4, 4, 64, 0.125, dtype=dtype)
        yield "causal", Shape(spec, base.SELFTEST_BATCH, base.SELFTEST_LEN)
        other = replace(spec, alibi_max_bias=8.0, sliding_window=64)
        yield "ALiBi, window", Shape(other, base.SELFTEST_BATCH, base.SELFTEST_LEN)

    def is_public(self, backend: str) -> bool:
        return backend not in ("triton", "reference", "sdpa:cpu")

    def sized(
        self, head_dim: int = 128, seq_len: int = 4096, variant: str = "plain", dtype: str = "bfloat16",
        tokens: int = base.TOKENS, heads: int | None = None, kv_heads: int | None = None, document: int = DOCUMENT,
        value_dim: int | None = None,
    ) -> Shape:  # fmt: skip
        """heads: None: as many as make up about 2048 channels. document: tokens of one. value_dim: None: head_dim."""
        if variant not in VARIANTS:
            causal = [name for name in VARIANTS if not name.endswith("full")]
            raise UserError(f"no attention variant '{variant}'; there is {', '.join(causal)}")
        heads = heads or (16 if head_dim >= 128 else max(1, 2048 // head_dim))
        of_values = None if value_dim == head_dim else value_dim
        spec = AttentionSpec(
            heads, kv_heads or heads, head_dim, head_dim**-0.5, dtype=dtype, value_dim=of_values, **VARIANTS[variant]
        )
        options = (("document", document),) if document != DOCUMENT else ()
        return Shape(spec, max(1, tokens // seq_len), seq_len, variant, options)

    def of_model(self, spec: AttentionSpec, batch: int, seq_len: int, documents: bool) -> Shape:
        return Shape(spec, batch, seq_len, variant_of(spec))

    def refusal(self, shape: Shape) -> str | None:
        spec = shape.spec
        if spec.n_heads % spec.n_kv_heads:
            return f"heads must be a multiple of kv_heads, and {spec.n_heads} is no multiple of {spec.n_kv_heads}"
        if self.full(shape):
            return "only causal attention is checked, so only that is tuned"
        return super().refusal(shape)

    def full(self, shape: Shape) -> bool:
        """True without causality."""
        return shape.variant is not None and shape.variant.endswith("full")


def _rows(spec: AttentionSpec, head: int, begin: int, qkv: Sequence[Tensor], ids: Tensor | None) -> Tensor:
    """Output [Q, width] of one head's queries from `begin` on; keys and values up to the last of them, and its sink if any."""
    q, k, v, *sink = qkv
    i = torch.arange(begin, begin + len(q), device=q.device)[:, None]
    j = torch.arange(len(k), device=q.device)[None, :]
    score = spec.scale * (q @ k.T)
    if spec.softcap is not None:
        score = spec.softcap * torch.tanh(score / spec.softcap)
    if spec.slopes is not None:
        score = score - spec.slopes[head] * (i - j)
    hidden = j > i
    if spec.sliding_window is not None:
        hidden = hidden | (i - j >= spec.sliding_window)
    if ids is not None:
        hidden = hidden | (ids[i] != ids[j])
    score = torch.cat([score.masked_fill(hidden, float("-inf")), *(t.expand(len(q), 1) for t in sink)], -1)
    return score.softmax(-1)[:, : len(k)] @ v


def features(spec: AttentionSpec) -> str:
    """Text of the features that a spec has beyond causality, such as `documents, window 1024`; `plain` for nothing."""
    named = {"ALiBi": spec.alibi_max_bias, "softcap": spec.softcap, "window": spec.sliding_window}
    found = ["documents"] * spec.documents + ["sinks"] * spec.sinks
    found += [name if name == "ALiBi" else f"{name} {value:g}" for name, value in named.items() if value is not None]
    return ", ".join(found) or "plain"


def variant_of(spec: AttentionSpec) -> str:
    """Name of a spec's features, as the kernels ask for rows."""
    given = (spec.alibi_max_bias, spec.documents or None, spec.softcap, spec.sliding_window)
    return variant_name(*(value is not None for value in given))


OPERATION = Attention()
