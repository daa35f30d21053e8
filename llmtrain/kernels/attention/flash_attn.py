"""The flash_attn package (Dao, arXiv:2307.08691), where it is installed."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.platform import Platform


def build(spec: AttentionSpec, platform: Platform, variant: str) -> FlashAttn:
    return FlashAttn(spec)


class FlashAttn:
    def __init__(self, spec: AttentionSpec):
        from flash_attn import flash_attn_func

        self.spec, self.slopes, self.kernel = spec, Slopes(spec), flash_attn_func

    def prepare(self, seq_len: int, device: torch.device, ids: None = None) -> Tensor | None:
        """ALiBi slopes [n_heads] in fp32, or None."""
        assert ids is None, "refused by the spec"
        return self.slopes.on(device)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None) -> Tensor:
        """q: [batch, T, n_heads, head_dim]; k, v: [batch, T, n_kv_heads, head_dim] -> like q."""
        spec = self.spec
        # Its window counts the tokens before a query, ours the query too.
        back = -1 if spec.sliding_window is None else spec.sliding_window - 1
        return self.kernel(
            q,
            k,
            v,
            softmax_scale=spec.scale,
            causal=True,
            window_size=(back, 0 if back >= 0 else -1),
            softcap=spec.softcap or 0.0,
            alibi_slopes=context,
        )
