"""Causal attention in plain PyTorch, written to be read. Stores the T x T scores of every head."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> ReferenceAttention:
    return ReferenceAttention(spec)


class ReferenceAttention:
    """softmax(softcap(scale * q k^T) + bias) v, with the softmax in fp32 or wider; sinks are scores of no value."""

    def __init__(self, spec: AttentionSpec):
        self.spec = spec

    def prepare(
        self, seq_len: int, device: torch.device, ids: Tensor | None = None, queries: int | None = None
    ) -> Tensor:
        """The additive bias in fp32: ALiBi, and -inf where a query must not look. [n_heads or 1, Q, T], or with batch in front.

        ids: [batch, T], integers; tokens see those with their own id. None: one document per sequence.
        queries: Q, if the queries are the last Q tokens alone; None: all T.
        """
        bias = score_bias(self.spec, seq_len, device, queries)
        if ids is None:
            return bias
        of_queries = ids[:, -bias.shape[1] :, None]
        return bias.masked_fill((of_queries != ids[:, None, :])[:, None], float("-inf"))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Tensor, sinks: Tensor | None = None) -> Tensor:
        """q: [batch, Q, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width]; sinks: [n_heads]
        -> [batch, Q, n_heads, width]."""
        spec = self.spec
        groups = spec.n_heads // spec.n_kv_heads
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
        wide = torch.promote_types(q.dtype, torch.float32)
        scores = (q @ k.transpose(-1, -2)).to(wide) * spec.scale
        if spec.softcap is not None:
            scores = spec.softcap * torch.tanh(scores / spec.softcap)
        scores = scores + context.to(wide)
        if sinks is not None:
            scores = torch.cat((scores, sinks.to(wide)[:, None, None].expand(*scores.shape[:-1], 1)), dim=-1)
        weights = torch.softmax(scores, dim=-1).to(v.dtype)
        return (weights[..., : v.shape[-2]] @ v).transpose(1, 2)


def score_bias(spec: AttentionSpec, seq_len: int, device: torch.device, queries: int | None = None) -> Tensor:
    """bias_between for a whole sequence, [n_heads or 1, Q, T]. queries: Q, if they are its last Q tokens alone."""
    at = torch.arange(seq_len, device=device)
    return bias_between(spec, at if queries is None else at[seq_len - queries :], at)


def bias_between(spec: AttentionSpec, queries: Tensor, keys: Tensor) -> Tensor:
    """[n_heads or 1, T, K] in fp32: -slope * (i - j) under ALiBi (else 0) where i may see j, -inf elsewhere.

    queries: [T] and keys: [K], their positions.
    """
    distance = queries[:, None] - keys[None, :]
    hidden = distance < 0
    if spec.sliding_window is not None:
        hidden = hidden | (distance >= spec.sliding_window)
    bias = -torch.tensor(spec.slopes or [0.0], device=queries.device)[:, None, None] * distance
    return bias.masked_fill(hidden, float("-inf"))
