"""The gated delta rule in chunked matrix form (Yang et al., arXiv:2412.06464, section 3.3).

Within a chunk, the products of (I - beta k k^T) have a WY representation, whose triangular system is solved for all tokens
at once (the UT transform); between chunks only states travel. All in fp32 or wider: errors of a state stay in it.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.platform import Platform

LEAST = -100.0
"""Log-decay of a token below which it counts as this: nothing is left of the state, and later tokens' sums would lose digits."""


def build(spec: GatedDeltaSpec, platform: Platform, variant: str) -> ReferenceGatedDelta:
    return ReferenceGatedDelta(spec)


class ReferenceGatedDelta:
    def __init__(self, spec: GatedDeltaSpec):
        self.spec = spec

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """q, k: [batch, T, key heads, key_head_dim], k of length 1 at most; v: [batch, T, heads, value_head_dim];
        log_decay (at most 0), beta: [batch, T, heads]; initial_state: [batch, heads, key_head_dim, value_head_dim], S^T of
        the recurrence; document_ids: [batch, T], integers that never fall: where they change, a document begins, and the
        state before it is dropped (the initial state belongs to the first).

        Returns y like v, and the state after the last token like initial_state, in fp32 or wider.
        """
        spec = self.spec
        dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
        batch, seq_len = v.shape[:2]
        count, size = spec.chunks(seq_len)
        padding = count * size - seq_len

        def by_chunk(t: Tensor) -> Tensor:
            """[batch, T, heads, ...] -> [batch, chunks, key heads, heads of one (1 for q and k), size, ...].

            A padded token is all zeros: it neither decays the state nor writes to it.
            """
            t = F.pad(t.to(wide), (0, 0) * (t.dim() - 2) + (0, padding))
            t = t.unflatten(2, (spec.n_key_heads, -1)).unflatten(1, (count, size))
            return t.movedim(2, 4)

        q, k, v, beta = by_chunk(q), by_chunk(k), by_chunk(v), by_chunk(beta)[..., None]
        # log of the decay from the start of the chunk up to and including each token, [..., size, 1 or channels].
        log_decay = _running_sum(self.by_channel(by_chunk(log_decay.clamp_min(LEAST))))
        hidden = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
        from_start, to_end = log_decay.exp(), (log_decay[..., -1:, :] - log_decay).exp()
        if document_ids is not None:
            ids = torch.cat([document_ids, document_ids[:, -1:].expand(-1, padding)], dim=1).view(batch, count, size)
            # Of the last token before each chunk.
            before = torch.cat([ids[:, :1, 0], ids[:, :-1, -1]], dim=1)[..., None]
            from_start = from_start * (ids == before)[:, :, None, None, :, None]
            to_end = to_end * (ids == ids[..., -1:])[:, :, None, None, :, None]
            hidden = hidden | (ids[..., :, None] != ids[..., None, :])[:, :, None, None]
        reads, overlaps = self.products(q, k, log_decay, hidden)

        # 1. What token i writes along k_i, had the chunk begun with a state of zeros: u_i; and what it writes less for each
        # element of the state that it begins with: w_i. Both take into account what tokens j < i have written:
        # (I + A) [u, w] = beta [v, from_start k], A_ij = beta_i (k_i . k_j) decay_ij.
        system = beta * overlaps
        given = torch.cat([beta * v, beta * from_start * k], dim=-1)
        solved = torch.linalg.solve_triangular(system, given, upper=False, unitriangular=True)
        u, w = solved.split([spec.value_head_dim, spec.key_head_dim], dim=-1)

        # 2. The state after a chunk = transition @ the state before it + added.
        k_to_end = (to_end * k).mT
        identity = torch.eye(spec.key_head_dim, dtype=wide, device=v.device)
        transition, added = from_start[..., -1:, :] * identity - k_to_end @ w, k_to_end @ u
        state = torch.zeros_like(added[:, 0])
        if initial_state is not None:
            state = initial_state.to(wide).view_as(state)
        states = [state]
        for chunk in range(count):
            states.append(transition[:, chunk] @ states[-1] + added[:, chunk])
        before, final = torch.stack(states[:-1], dim=1), states[-1]

        # 3. Each token reads the state before its chunk, and what was written in the chunk up to itself.
        y = (from_start * q) @ before + reads @ (u - w @ before)
        y = y.movedim(4, 2).flatten(1, 2).flatten(2, 3)[:, :seq_len]
        return y.to(dtype), final.flatten(1, 2)

    def by_channel(self, log_decay: Tensor) -> Tensor:
        """[..., size] -> [..., size, channels that have a decay of their own]."""
        return log_decay[..., None]

    def products(self, q: Tensor, k: Tensor, log_decay: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """q_i . k_j and k_i . k_j, each times the decay from token j to token i, [..., size, size]: zero where hidden.

        q, k: [..., size, channels]; log_decay: [..., size, 1], sums from the chunk's start.
        """
        # Masked before exp: above the diagonal the exponent is positive and may overflow to inf * 0.
        between = (log_decay - log_decay.mT).masked_fill(hidden, float("-inf")).exp()
        return (q @ k.mT) * between, (k @ k.mT) * between


def _running_sum(t: Tensor) -> Tensor:
    """Cumulative sum over the dimension before the last by doubling: the gradient of decays is a small difference of such sums.

    torch.cumsum does not compile for small batches: Inductor (torch 2.11) fails on a scan that it splits.
    """
    shift = 1
    while shift < t.shape[-2]:
        t = t + F.pad(t[..., :-shift, :], (0, 0, shift, 0))
        shift *= 2
    return t
