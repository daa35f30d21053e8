"""One token of Mamba-2's recurrence (arXiv:2405.21060), in plain PyTorch: the definition, line by line."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


def build(spec: SSDSpec, platform: Platform, variant: str) -> ReferenceSSDStep:
    return ReferenceSSDStep(spec)


class ReferenceSSDStep:
    def __init__(self, spec: SSDSpec):
        self.spec = spec

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor
    ) -> Tensor:
        """h = exp(dt A) h + dt x B^T, y = h C + D x, all in the dtype of the state; the state is updated in place.

        x: [batch, heads, head_dim]; dt: [batch, heads], before bias and softplus; A, D, dt_bias: [heads], A negative;
        B, C: [batch, groups, d_state]; state: [batch, heads, head_dim, d_state], fp32 or wider. Returns y like x.
        """
        wide, per_group = state.dtype, x.shape[1] // self.spec.n_groups
        dt = F.softplus(dt.to(wide) + dt_bias.to(wide))
        if self.spec.dt_limit is not None:
            dt = dt.clamp(*self.spec.dt_limit)
        B, C = (t.to(wide).repeat_interleave(per_group, dim=1) for t in (B, C))  # [batch, heads, d_state]
        decay = torch.exp(dt * A.to(wide))
        added = (dt[..., None] * x.to(wide))[..., None] * B[..., None, :]
        state.mul_(decay[..., None, None]).add_(added)
        y = (state @ C[..., None])[..., 0] + D.to(wide)[:, None] * x.to(wide)
        return y.to(x.dtype)
