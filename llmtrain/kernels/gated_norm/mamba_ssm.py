"""state-spaces/mamba's Triton norm, where the mamba_ssm package is installed."""

from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform


def build(spec: GatedNormSpec, platform: Platform, variant: str):
    from mamba_ssm.ops.triton.layernorm_gated import rmsnorm_fn  # type: ignore[import-not-found]

    kernel: Any = torch.compiler.disable(rmsnorm_fn)  # like the scan of that package, it cannot be traced

    def gated_norm(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
        """x, z: [..., dim]; weight: [dim] -> like x."""
        return kernel(
            x, weight, None, z=z, eps=spec.eps, group_size=spec.group_size, norm_before_gate=spec.norm_before_gate
        )

    return gated_norm
