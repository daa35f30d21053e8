"""LayerNorm and RMSNorm of a residual stream in plain PyTorch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.platform import Platform


def build(spec: NormSpec, platform: Platform, variant: str) -> ReferenceNorm:
    return ReferenceNorm(spec)


class ReferenceNorm:
    def __init__(self, spec: NormSpec):
        self.spec = spec

    def __call__(
        self, x: Tensor, delta: Tensor | None, weight: Tensor, bias: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x + delta, and its norm. x, delta (None: nothing is added): [..., dim]; weight, bias: [dim]. Like x."""
        total = x if delta is None else x + delta
        if weight.dtype != total.dtype:  # a weight kept in fp32 beside activations in bf16
            wide = total.to(weight.dtype)
            return total, self(wide, None, weight, None if bias is None else bias.to(wide.dtype))[1].to(total.dtype)
        # Both functions accumulate in fp32 for lower-precision inputs.
        if self.spec.type == "layernorm":
            return total, F.layer_norm(total, weight.shape, weight, bias, self.spec.eps)
        return total, F.rms_norm(total, weight.shape, weight, self.spec.eps)
