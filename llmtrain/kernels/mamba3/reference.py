"""Mamba-3's recurrence (SISO) in chunked matrix form, as the authors' module (state-spaces/mamba) defines it token by token:

h_t = a_t h_(t-1) + (1 - l_t) dt_t a_t v_(t-1) k_(t-1)^T + l_t dt_t v_t k_t^T,  y_t = h_t q_t + D v_t,

per head, with a_t = exp(log_decay_t). q and k are rotated by running sums of angles: scores depend on what lies between two tokens.
The second summand reads the token before. It is counted with that token here, by a weight of the token behind: so one scan,
in which a token's own score has another weight than those of later tokens for it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.platform import Platform


class State(NamedTuple):
    """Tensors that later tokens need: h [batch, heads, head_dim, d_state], the sums of angles [batch, heads, angles], and the last
    token's rotated k [batch, heads, d_state] and v [batch, heads, head_dim]."""

    h: Tensor
    angle: Tensor
    k: Tensor
    v: Tensor


def build(spec: Mamba3Spec, platform: Platform, variant: str) -> ReferenceMamba3:
    return ReferenceMamba3(spec.chunk_size)


class ReferenceMamba3:
    def __init__(self, chunk_size: int):
        self.chunk_size = chunk_size

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
        k_bias: Tensor, D: Tensor, state: State | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, State]:  # fmt: skip
        """q, k: [batch, T, groups, d_state]; v: [batch, T, heads, head_dim]; log_decay (at most 0), dt, later (l, between 0 and
        1): [batch, T, heads]; rate: [batch, T, angles], radians per unit of time by which a token is rotated from the one before;
        q_bias, k_bias: [heads, d_state], added to q and k of each head; D: [heads]; document_ids: [batch, T], integers that
        never fall: where they change, a document begins, and what is before it is dropped (the state belongs to the first).

        Returns y like v, and the state after the last token, in fp32 or wider.
        """
        dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
        heads = v.shape[2]
        q, k = (of_heads(t, bias, heads) for t, bias in ((q, q_bias), (k, k_bias)))
        rotation = rate.to(wide)[..., None, :] * dt.to(wide)[..., None]
        q, k, v, log_decay, dt, later, rotation = (
            t.to(wide).transpose(1, 2) for t in (q, k, v, log_decay, dt, later, rotation)
        )
        angle = _running_sum(rotation, wrapped=True)
        if state is not None:
            angle = torch.remainder(angle + state.angle[:, :, None], 2 * math.pi)
        q, k = rotated(q, angle), rotated(k, angle)
        before = (1 - later) * dt  # weight of the token before
        own, behind = later * dt, F.pad(before[..., 1:], (0, 1))
        if document_ids is not None:
            ends = F.pad(document_ids[:, 1:] != document_ids[:, :-1], (0, 1))
            behind = behind.masked_fill(ends[:, None], 0.0)
        h = v.new_zeros(*v.shape[:2], v.shape[-1], k.shape[-1])
        if state is not None:
            h = with_token_before(state, dt.mT, later.mT)
        last = State(h, angle[:, :, -1], k[:, :, -1], v[:, :, -1])
        y, h = self._scan(q, k, v, log_decay, own, behind, h, document_ids)
        y = y + D.to(wide)[:, None, None] * v
        return y.transpose(1, 2).to(dtype), last._replace(h=h)

    def _scan(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, own: Tensor, behind: Tensor, h: Tensor,
        document_ids: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """y and the last state. A token j has the weight own_j for itself, own_j + behind_j for later ones."""
        seq_len = v.shape[2]
        size = min(self.chunk_size, seq_len)
        count = -(-seq_len // size)
        padding = count * size - seq_len

        def by_chunk(t: Tensor) -> Tensor:
            """[batch, heads, T, ...] -> [batch, chunks, heads, size, ...]; a padded token neither decays nor writes."""
            t = F.pad(t, (0, 0) * (t.dim() - 3) + (0, padding))
            return t.unflatten(2, (count, size)).transpose(1, 2)

        q, k, v, own, behind = (by_chunk(t) for t in (q, k, v, own, behind))
        log_decay = _running_sum(by_chunk(log_decay)[..., None])[..., 0]
        weight = own + behind
        hidden = torch.ones(size, size, dtype=torch.bool, device=v.device).triu(1)
        from_start, to_end = log_decay.exp(), (log_decay[..., -1:] - log_decay).exp()
        kept = from_start[..., -1]
        if document_ids is not None:
            ids = torch.cat([document_ids, document_ids[:, -1:].expand(-1, padding)], dim=1).view(-1, count, 1, size)
            first = torch.cat([ids[:, :1, :, 0], ids[:, :-1, :, -1]], dim=1)[
                ..., None
            ]  # of the last token before a chunk
            from_start, to_end = from_start * (ids == first), to_end * (ids == ids[..., -1:])
            kept = kept * (first == ids[..., -1:])[..., 0]
            hidden = hidden | (ids[..., :, None] != ids[..., None, :])
        # Masked before exp: above the diagonal the exponent is positive and may overflow to inf * 0.
        between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(hidden, float("-inf")).exp()
        weights = torch.where(
            torch.eye(size, dtype=torch.bool, device=v.device), own[..., None, :], weight[..., None, :]
        )
        y = ((q @ k.mT) * between * weights) @ v
        added = ((to_end * weight)[..., None] * v).mT @ k
        states = [h]
        for chunk in range(count):
            states.append(kept[:, chunk, :, None, None] * states[-1] + added[:, chunk])
        y = y + (from_start[..., None] * q) @ torch.stack(states[:-1], dim=1).mT
        return y.transpose(1, 2).flatten(2, 3)[:, :, :seq_len], states[-1]


def of_heads(t: Tensor, bias: Tensor, heads: int) -> Tensor:
    """q or k of each head, [..., heads, d_state] in fp32 or wider. t: [..., groups, d_state]; bias: [heads, d_state]."""
    wide = torch.promote_types(t.dtype, torch.float32)
    return t.to(wide).repeat_interleave(heads // t.shape[-2], dim=-2) + bias.to(wide)


def with_token_before(state: State, dt: Tensor, later: Tensor) -> Tensor:
    """h, to which the state's token is added by the weight that it has for the next, in fp32 or wider. dt, later: [batch, T,
    heads] of the tokens that come."""
    weight = ((1 - later[:, 0]) * dt[:, 0])[..., None, None]
    h, k, v = (t.to(weight.dtype) for t in (state.h, state.k, state.v))
    return h + weight * v[..., None] * k[..., None, :]


def rotated(t: Tensor, angle: Tensor) -> Tensor:
    """Neighbouring channels 2 i and 2 i + 1 rotated by the i-th angle, the others as they are. t: [..., d_state]; angle: [...,
    angles]."""
    pairs, rest = t.tensor_split((2 * angle.shape[-1],), dim=-1)
    a, b = pairs.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = angle.cos(), angle.sin()
    return torch.cat([torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).flatten(-2), rest], dim=-1)


def _running_sum(t: Tensor, wrapped: bool = False) -> Tensor:
    """Cumulative sum over the dimension before the last, by doubling (torch.cumsum does not compile for small batches). wrapped: in
    radians, kept below 2 pi, so that fp32 holds them."""
    shift = 1
    while shift < t.shape[-2]:
        t = t + F.pad(t[..., :-shift, :], (0, 0, shift, 0))
        t = torch.remainder(t, 2 * math.pi) if wrapped else t
        shift *= 2
    return t
