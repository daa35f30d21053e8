"""One token of Mamba-3's recurrence, in plain PyTorch: the definition, line by line."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from llmtrain.kernels.mamba3.reference import State, of_heads, rotated, with_token_before
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.platform import Platform


def build(spec: Mamba3Spec, platform: Platform, variant: str) -> ReferenceMamba3Step:
    return ReferenceMamba3Step()


class ReferenceMamba3Step:
    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
        k_bias: Tensor, D: Tensor, state: State,
    ) -> Tensor:  # fmt: skip
        """h = a (h + (1 - l) dt v' k'^T) + l dt v k^T, y = h q + D v with the state's v' and k', all in the dtype of the state,
        which is updated in place.

        q, k: [batch, groups, d_state]; v: [batch, heads, head_dim]; log_decay, dt, later: [batch, heads]; rate: [batch, angles];
        q_bias, k_bias: [heads, d_state]; D: [heads]; state: fp32 or wider. Returns y like v.
        """
        wide, heads = state.h.dtype, v.shape[1]
        log_decay, dt, later, rate = (t.to(wide) for t in (log_decay, dt, later, rate))
        state.angle.copy_(torch.remainder(state.angle + dt[..., None] * rate[:, None], 2 * math.pi))
        rotated_q, rotated_k = (
            rotated(of_heads(t, bias, heads).to(wide), state.angle) for t, bias in ((q, q_bias), (k, k_bias))
        )
        h = with_token_before(state, dt[:, None], later[:, None]) * log_decay.exp()[..., None, None]
        h = h + (later * dt)[..., None, None] * v.to(wide)[..., None] * rotated_k[..., None, :]
        for kept, new in zip((state.h, state.k, state.v), (h, rotated_k, v), strict=True):
            kept.copy_(new)
        return ((h @ rotated_q[..., None])[..., 0] + D.to(wide)[:, None] * v.to(wide)).to(v.dtype)
