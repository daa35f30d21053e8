"""Rotary positions in PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.rotary.spec import RotarySpec


def build(spec: RotarySpec, platform: Platform, variant: str) -> ReferenceRotary:
    return ReferenceRotary()


class ReferenceRotary:
    """Rotated queries and keys, computed in fp32 or wider."""

    def __call__(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """q, k: [batch, T, heads, head_dim]; cos, sin: [T, 1, head_dim / 2], or with batch in front. Returns like q and k."""
        return rotate(q, cos, sin), rotate(k, cos, sin)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.to(torch.promote_types(x.dtype, torch.float32)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1).to(x.dtype)
