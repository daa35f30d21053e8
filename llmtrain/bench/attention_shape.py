"""Attention of one layer at one length: its tensors, its exact result, and its name. For measuring every backend on it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes

DOCUMENT = 700
"""Tokens of a document, where sequences are packed."""
_BLOCK = 2048
"""Queries whose scores in float64 exist at a time."""


@dataclass(frozen=True)
class AttentionShape:
    """batch sequences of seq_len tokens; with spec.documents each holds documents of 700 tokens."""

    spec: AttentionSpec
    seq_len: int
    batch: int

    @property
    def label(self) -> str:
        spec = self.spec
        return f"{spec.n_heads} on {spec.n_kv_heads} x {spec.head_dim} {features(spec)}"

    def ids(self, device: str | torch.device) -> Tensor | None:
        """Document ids [batch, seq_len], or None."""
        if not self.spec.documents:
            return None
        return (torch.arange(self.seq_len, device=device) // DOCUMENT).expand(self.batch, -1)

    def flops(self) -> float:
        """FLOP of the forward pass: 4 head_dim per visible pair and head."""
        pairs = self.spec.pairs(self.seq_len, causal=True)
        if self.spec.documents:
            whole, rest = divmod(self.seq_len, DOCUMENT)
            pairs = whole * self.spec.pairs(DOCUMENT, causal=True) + self.spec.pairs(rest, causal=True)
        return 4.0 * pairs * self.spec.n_heads * self.spec.head_dim * self.batch

    def tensors(self, device: str, seed: int = 0) -> tuple[list[Tensor], Tensor]:
        """q, k, v [batch, T, heads, head_dim] as slices of one projection, and the gradient of the output, like q."""
        spec, dtype = self.spec, getattr(torch, self.spec.dtype)
        heads = (spec.n_heads, spec.n_kv_heads, spec.n_kv_heads)
        g = torch.Generator(device).manual_seed(seed)

        def random(width: int) -> Tensor:
            return torch.randn(self.batch, self.seq_len, width, generator=g, device=device).to(dtype)

        slices = random(sum(heads) * spec.head_dim).split([h * spec.head_dim for h in heads], dim=-1)
        qkv = [t.unflatten(-1, (h, spec.head_dim)) for t, h in zip(slices, heads, strict=True)]
        return qkv, random(spec.n_heads * spec.head_dim).unflatten(-1, (spec.n_heads, spec.head_dim))

    def first_group(self, t: Tensor) -> Tensor:
        """Slice of [batch, T, heads, head_dim]: the last sequence's first key head, or the query heads that share it."""
        return t[-1:, :, : t.shape[2] // self.spec.n_kv_heads]

    def exact(self, qkv: Sequence[Tensor], dout: Tensor) -> list[Tensor]:
        """`first_group` of the output and of the gradients of q, k and v, in float64: head by head, some queries at a time, so
        that a sequence of 32,768 tokens fits."""
        q, k, v, dout = (self.first_group(t.detach())[0].transpose(0, 1).double() for t in (*qkv, dout))
        out, dq, dk, dv = (torch.zeros_like(t) for t in (q, q, k, v))
        ids = self.ids(q.device)
        for head in range(q.shape[0]):
            for begin in range(0, self.seq_len, _BLOCK):
                rows = slice(begin, min(begin + _BLOCK, self.seq_len))
                leaves = [t.clone().requires_grad_() for t in (q[head, rows], k[0, : rows.stop], v[0, : rows.stop])]
                part = self._rows(head, begin, leaves, None if ids is None else ids[-1])
                out[head, rows] = part.detach()
                grads = torch.autograd.grad(part, leaves, dout[head, rows])
                dq[head, rows] = grads[0]
                dk[0, : rows.stop] += grads[1]
                dv[0, : rows.stop] += grads[2]
        return [t.transpose(0, 1)[None] for t in (out, dq, dk, dv)]

    def _rows(self, head: int, begin: int, qkv: list[Tensor], ids: Tensor | None) -> Tensor:
        """Output [Q, head_dim] of one head's queries from `begin` on; keys and values up to the last of them."""
        spec, (q, k, v) = self.spec, qkv
        i = torch.arange(begin, begin + len(q), device=q.device)[:, None]
        j = torch.arange(len(k), device=q.device)[None, :]
        score = spec.scale * (q @ k.T)
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        if spec.alibi_max_bias is not None:
            score = score - alibi_slopes(spec.n_heads, spec.alibi_max_bias)[head] * (i - j)
        hidden = j > i
        if spec.sliding_window is not None:
            hidden = hidden | (i - j >= spec.sliding_window)
        if ids is not None:
            hidden = hidden | (ids[i] != ids[j])
        return score.masked_fill(hidden, float("-inf")).softmax(-1) @ v


def features(spec: AttentionSpec) -> str:
    """Text of the features that a spec has beyond causality, such as `documents, window 1024`; `plain` for nothing."""
    named = {"ALiBi": spec.alibi_max_bias, "softcap": spec.softcap, "window": spec.sliding_window}
    found = ["documents"] * spec.documents
    found += [name if name == "ALiBi" else f"{name} {value:g}" for name, value in named.items() if value is not None]
    return ", ".join(found) or "plain"
