"""Another kernel for the SSD: the recurrence itself, token by token, where the reference multiplies matrices by chunks."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


def build(spec: SSDSpec, platform: Platform, variant: str) -> SequentialSSD:
    return SequentialSSD(spec)


@dataclass
class SequentialSSD:
    """Called as ReferenceSSD is. calls: of all of them, so that a test sees that it served."""

    spec: SSDSpec
    calls = 0

    def __call__(self, x, dt, A, B, C, D, dt_bias, initial_state=None, document_ids=None) -> tuple[Tensor, Tensor]:
        assert document_ids is None
        type(self).calls += 1
        dt = F.softplus(dt + dt_bias)
        if self.spec.dt_limit is not None:
            dt = dt.clamp(*self.spec.dt_limit)
        B, C = (t.repeat_interleave(self.spec.n_heads // self.spec.n_groups, dim=2) for t in (B, C))
        h = x.new_zeros(*x[:, 0].shape, B.shape[-1]) if initial_state is None else initial_state
        y = []
        for t in range(x.shape[1]):
            added = (dt[:, t, :, None] * x[:, t])[..., None] * B[:, t, :, None, :]
            h = torch.exp(dt[:, t] * A)[..., None, None] * h + added
            y.append((h * C[:, t, :, None, :]).sum(-1) + D[:, None] * x[:, t])
        return torch.stack(y, 1), h
