"""PyTorch's scaled dot product attention, one named kernel each.

The GPU variants call the kernel's own operator: F.scaled_dot_product_attention would fall back to another
kernel without a word, and the operator traces under torch.compile(fullgraph=True).
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.attention import flash_implementation, suffix
from llmtrain.kernels.attention.reference import score_bias
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.suffix import SuffixAttention
from llmtrain.kernels.platform import Platform

_FLASH: dict[str, flash_implementation.Implementation] = {"flash": "FA2", "flash3": "FA3", "flash4": "FA4"}

# (q, k, v [batch, heads, T, head_dim], bias or None, scale) -> [batch, n_heads, T, head_dim]
_Kernel = Callable[[Tensor, Tensor, Tensor, Tensor | None, float], Tensor]


def build(spec: AttentionSpec, platform: Platform, variant: str) -> Any:
    causal = replace(spec, sinks=False).only_causal
    if causal and (spec.lower_right or spec.sinks) and variant in suffix.KERNELS:
        return SuffixAttention(spec, variant)
    return SDPA(spec, variant)


class SDPA:
    """Causal attention by the kernel that `variant` names: flash, flash3, flash4, cudnn, efficient or cpu."""

    def __init__(self, spec: AttentionSpec, variant: str):
        self.spec = spec
        kernels: dict[str, _Kernel] = {"cudnn": _cudnn, "efficient": _efficient, "cpu": _cpu}
        self.kernel = kernels.get(variant, _flash)
        if variant in _FLASH:
            flash_implementation.use(self, _FLASH[variant])
        # FlashAttention's causal mask is aligned to the lower right by itself, the efficient kernel's to the upper left.
        self.needs_bias = not spec.plain and not (variant in _FLASH and spec.only_causal)
        # The efficient kernel wants as many key as query heads; the others share them without a copy.
        self.repeat = spec.n_heads // spec.n_kv_heads if variant == "efficient" else 1

    def prepare(
        self, seq_len: int, device: torch.device, ids: None = None, queries: int | None = None
    ) -> Tensor | None:
        """ALiBi and the window as a bias [1, n_heads, Q, T], of the inputs' dtype; None for plain attention.

        queries: Q, if the queries are the last Q tokens alone; None: all T.
        """
        assert ids is None, "refused by the spec"
        if not self.needs_bias:
            return None
        dtype = getattr(torch, self.spec.dtype)
        bias = score_bias(self.spec, seq_len, device, queries).to(dtype)
        # The efficient kernel reads rows aligned to 16 bytes: pad each row and show it without the padding.
        return F.pad(bias, (0, -seq_len % 8))[None, :, :, :seq_len].expand(1, self.spec.n_heads, -1, -1)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None) -> Tensor:
        """q: [batch, Q, n_heads, head_dim]; k: [batch, T, n_kv_heads, head_dim]; v: [batch, T, n_kv_heads, width]
        -> [batch, Q, n_heads, width]."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.repeat > 1:
            k, v = k.repeat_interleave(self.repeat, dim=1), v.repeat_interleave(self.repeat, dim=1)
        if context is not None:
            context = context.to(q.dtype).expand(q.shape[0], -1, -1, -1)
        return self.kernel(q, k, v, context, self.spec.scale).transpose(1, 2)


def _flash(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, is_causal=True, scale=scale)[0]


def _cudnn(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    op = torch.ops.aten._scaled_dot_product_cudnn_attention
    return op(q, k, v, None, compute_log_sumexp=True, is_causal=True, scale=scale)[0]


def _efficient(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    op = torch.ops.aten._scaled_dot_product_efficient_attention
    return op(q, k, v, bias, compute_log_sumexp=True, is_causal=bias is None, scale=scale)[0]


def _cpu(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=scale, enable_gqa=True)
