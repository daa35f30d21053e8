"""FlexAttention with whatever mask and change of scores a spec and packed documents ask for, as a peer of our kernels."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from llmtrain.kernels.attention.spec import AttentionSpec, alibi_slopes

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def flex(spec: AttentionSpec, seq_len: int, ids: Tensor | None) -> Attention:
    """q: [batch, T, n_heads, head_dim], k, v alike -> like q. ids: [batch, T], documents, or None."""
    window = spec.sliding_window or seq_len

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        seen = (i >= j) if spec.sliding_window is None else (i >= j) & (i - j < window)
        return seen if ids is None else seen & (ids[b, i] == ids[b, j])

    slopes = torch.tensor(alibi_slopes(spec.n_heads, spec.alibi_max_bias or 1.0), device="cuda")

    def change(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if spec.softcap is not None:
            score = spec.softcap * torch.tanh(score / spec.softcap)
        return score - slopes[h] * (i - j) if spec.alibi_max_bias is not None else score

    batch = None if ids is None else ids.shape[0]
    mask = create_block_mask(visible, batch, None, seq_len, seq_len, device="cuda")
    plain = spec.softcap is None and spec.alibi_max_bias is None
    kernel = torch.compile(flex_attention, dynamic=False)
    grouped = spec.n_heads != spec.n_kv_heads

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        options = {"block_mask": mask, "scale": spec.scale, "enable_gqa": grouped}
        out = kernel(q, k, v, score_mod=None if plain else change, **options)
        assert isinstance(out, Tensor)
        return out.transpose(1, 2)

    return run
