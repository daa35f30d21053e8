"""Attention of any queries to any keys under an additive bias, for reading a prompt into a cache. No gradients needed."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels import registry
from llmtrain.kernels.attention.reference import bias_between
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform


class MaskedAttention:
    """q: [batch, T, n_heads, head_dim]; k: [batch, K, n_kv_heads, head_dim]; v: [batch, K, n_kv_heads, width]; bias as made here;
    sinks: [n_heads] -> [batch, T, n_heads, width]."""

    def __init__(self, spec: AttentionSpec, platform: Platform):
        self.spec = spec = replace(spec, documents=False)  # a cache holds one document per row
        # These backends take the bias as their context; none is compiled for a length.
        names = ("reference",) if spec.sinks else ("sdpa:efficient", "sdpa:cpu", "reference")
        able = next(name for name in names if registry.refusal("attention", name, spec, platform) is None)
        self.kernel = registry.resolve("attention", able, spec, platform).build(spec, platform)

    def bias(self, queries: Tensor, keys: Tensor, first: Tensor | None = None) -> Tensor:
        """ALiBi, window and causality between slots. queries: [T]; keys: [K]; first: [batch], a row's first valid key.

        Returns [batch or 1, n_heads, T, K] of the spec's dtype.
        """
        bias = bias_between(self.spec, queries, keys)[None]
        if first is not None:
            bias = bias.masked_fill(keys < first[:, None, None, None], float("-inf"))
        bias = bias.to(getattr(torch, self.spec.dtype))
        # The efficient kernel reads rows aligned to 16 bytes: pad each row and show it without the padding.
        n_keys = keys.shape[0]
        return F.pad(bias, (0, -n_keys % 8))[..., :n_keys].expand(-1, self.spec.n_heads, -1, -1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, *sinks: Tensor) -> Tensor:
        return self.kernel(q, k, v, bias, *sinks)
