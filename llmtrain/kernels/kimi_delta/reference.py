"""Kimi Delta Attention's rule in chunked matrix form (arXiv:2510.26692, section 3): the gated delta rule's, where only the products
of two tokens of a chunk differ, since each channel decays in its own way.

The decay between tokens j < i is exp(G_i - G_j) with running sums G: it does not factor into exp(G_i) exp(-G_j), which overflows.
Here a chunk is halved, and halves again. Between a pair of halves it is exp(G_i - G_m) exp(G_m - G_j), m being the last token
of the first: both exponents are at most 0, however strong the decay, and the products of the two halves are one of matrices.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.gated_delta.reference import ReferenceGatedDelta
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.platform import Platform


def build(spec: KimiDeltaSpec, platform: Platform, variant: str) -> ReferenceKimiDelta:
    return ReferenceKimiDelta(spec)


class ReferenceKimiDelta(ReferenceGatedDelta):
    """The signature of ReferenceGatedDelta, log_decay being [batch, T, heads, key_head_dim]."""

    def by_channel(self, log_decay: Tensor) -> Tensor:
        return log_decay

    def products(self, q: Tensor, k: Tensor, log_decay: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Products of the gated delta rule; log_decay: [..., size, channels]."""
        rows, k = torch.stack([q.expand_as(log_decay), k.expand_as(log_decay)]), k.expand_as(log_decay)
        found = (rows * k).sum(-1)[..., None, None]  # of each token with itself, [2, ..., size, 1, 1]
        while (half := found.shape[-1]) < k.shape[-2]:
            late, (early, _) = _halves(rows, half)[1], _halves(k, half)
            first, second = _halves(log_decay, half)
            middle = first[..., -1:, :]
            between = (late * (second - middle).exp()) @ (early * (middle - first).exp()).mT
            above, below = found.unflatten(-3, (-1, 2)).unbind(-3)
            found = torch.cat([F.pad(above, (0, half)), torch.cat([between, below], dim=-1)], dim=-2)
        reads, overlaps = found.squeeze(-3).masked_fill(hidden, 0.0)
        return reads, overlaps


def _halves(t: Tensor, half: int) -> tuple[Tensor, Tensor]:
    """[..., size, channels] -> the first and the second halves of its blocks of 2 * half rows, [..., blocks, half, channels]."""
    first, second = t.unflatten(-2, (-1, 2, half)).unbind(-3)
    return first, second
