"""RMSNorm with a gate (Mamba-2's output norm; RMSNorm: Zhang & Sennrich, arXiv:1910.07467) in plain PyTorch."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform


def build(spec: GatedNormSpec, platform: Platform, variant: str) -> ReferenceGatedNorm:
    return ReferenceGatedNorm(spec)


def gate_of(spec: GatedNormSpec) -> Callable[[Tensor], Tensor]:
    return F.silu if spec.gate == "silu" else torch.sigmoid


class ReferenceGatedNorm:
    def __init__(self, spec: GatedNormSpec):
        self.spec = spec

    def __call__(self, x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """x, z: [..., dim]; weight: [dim] -> like x, computed in fp32 or wider."""
        spec, wide = self.spec, torch.promote_types(x.dtype, torch.float32)
        y, gate = x.to(wide), gate_of(spec)(z.to(wide))
        if not spec.norm_before_gate:
            y = y * gate
        grouped = y.unflatten(-1, (spec.n_groups, -1))
        y = F.rms_norm(grouped, grouped.shape[-1:], eps=spec.eps).flatten(-2) * weight
        return (y * gate if spec.norm_before_gate else y).to(x.dtype)
