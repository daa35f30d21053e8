"""Mamba-2's state-space duality in chunked matrix form: the "minimal SSD" of arXiv:2405.21060, section 6.

Within a chunk the scan is masked attention; between chunks only states travel. Matrix products run in the
dtype of x; time steps, decays and states in fp32 or wider.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec


def build(spec: SSDSpec, platform: Platform, variant: str) -> ReferenceSSD:
    return ReferenceSSD(spec)


class ReferenceSSD:
    def __init__(self, spec: SSDSpec):
        self.spec = spec

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor,
        initial_state: Tensor | None = None, document_ids: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """x: [batch, T, heads, head_dim]; dt: [batch, T, heads], before bias and softplus; A, D, dt_bias: [heads],
        A negative; B, C: [batch, T, groups, d_state]; initial_state: [batch, heads, head_dim, d_state];
        document_ids: [batch, T], integers that never fall: where they change, a document begins, and the state before it
        is dropped (the initial state belongs to the first).

        Returns y like x, and the state after the last token like initial_state, in fp32 or wider.
        """
        spec = self.spec
        wide = torch.promote_types(x.dtype, torch.float32)
        dt = F.softplus(dt.to(wide) + dt_bias.to(wide))
        if spec.dt_limit is not None:
            dt = dt.clamp(*spec.dt_limit)

        batch, seq_len, heads, head_dim = x.shape
        groups, d_state = spec.n_groups, spec.d_state
        count, size = spec.chunks(seq_len)
        # A padded token has dt = 0: it neither decays the state nor adds to it.
        padding = count * size - seq_len
        x_in = x
        if padding:
            x, B, C = (F.pad(t, (0, 0, 0, 0, 0, padding)) for t in (x, B, C))
            dt = F.pad(dt, (0, 0, 0, padding))
        packed = None if document_ids is None else _Packed.of(document_ids, count, size)

        # Heads of one group share B and C: [batch, chunks, groups, heads of the group, size, ...]
        x = (x * dt[..., None]).to(x.dtype).view(batch, count, size, groups, heads // groups, head_dim)
        x = x.permute(0, 1, 3, 4, 2, 5)
        B = B.view(batch, count, size, groups, d_state).transpose(2, 3)
        C = C.view(batch, count, size, groups, d_state).transpose(2, 3)
        dt = dt.view(batch, count, size, groups, heads // groups).permute(0, 1, 3, 4, 2)
        # log of the decay from the start of the chunk up to and including each token, <= 0
        log_decay = _running_sum(dt * A.to(wide).view(groups, -1, 1))

        # From here on x is dt * x.

        # 1. Within chunks: y_i = sum over j <= i of (C_i . B_j) exp(log_decay_i - log_decay_j) x_j.
        # Masked before exp: above the diagonal the exponent is positive and may overflow to inf * 0.
        hidden = torch.ones(size, size, dtype=torch.bool, device=x.device).triu(1)
        if packed is not None:
            hidden = hidden | packed.between_tokens
        between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(hidden, float("-inf"))
        scores = (C @ B.transpose(-1, -2))[:, :, :, None] * between.exp()
        y = scores.to(x.dtype) @ x

        # 2. What each chunk adds to the state at its end, [batch, chunks, groups, heads, head_dim, d_state].
        to_end = (log_decay[..., -1:] - log_decay).exp()
        if packed is not None:
            to_end = to_end.masked_fill(packed.before_the_end, 0.0)
        weighted = (x * to_end[..., None]).to(x.dtype).transpose(-1, -2)
        added = (weighted.flatten(3, 4) @ B).unflatten(3, (-1, head_dim)).to(wide)

        # 3. Between chunks: state before chunk c = sum over b < c of the decay in between times what b added.
        start = torch.zeros_like(added[:, :1])
        if initial_state is not None:
            start = initial_state.to(wide).view_as(start)
        states = _pass_states(torch.cat([start, added], dim=1), log_decay[..., -1], packed and packed.between_chunks)
        before, final = states[:, :-1], states[:, -1]

        # 4. What the state before the chunk contributes: y_i += exp(log_decay_i) C_i . state.
        from_before = log_decay.exp()
        if packed is not None:
            from_before = from_before.masked_fill(packed.after_the_start, 0.0)
        carried = C @ before.to(x.dtype).flatten(3, 4).transpose(-1, -2)
        carried = carried.unflatten(-1, (-1, head_dim)).transpose(-2, -3) * from_before[..., None]
        y = (y + carried).permute(0, 1, 4, 2, 3, 5).reshape(batch, count * size, heads, head_dim)[:, :seq_len]
        return (y + x_in * D.to(wide)[:, None]).to(x.dtype), final.reshape(batch, heads, head_dim, d_state)


@dataclass(frozen=True)
class _Packed:
    """Masks for documents; True hides what lies in another document. The dimensions of groups and heads are 1.

    between_tokens: [batch, chunks, 1, 1, size, size], query and key of one chunk.
    before_the_end, after_the_start: [batch, chunks, 1, 1, size], tokens of another document than their chunk's last, and
        than the last before their chunk.
    between_chunks: [batch, 1, 1, chunks + 1, chunks + 1], the ends of two chunks (the sequence's start comes first).
    """

    between_tokens: Tensor
    before_the_end: Tensor
    after_the_start: Tensor
    between_chunks: Tensor

    @classmethod
    def of(cls, ids: Tensor, count: int, size: int) -> _Packed:
        """ids: [batch, T]. Padding belongs to the last document, so that its state is the final one."""
        padding = ids[:, -1:].expand(-1, count * size - ids.shape[1])
        chunks = torch.cat([ids, padding], dim=1).view(-1, count, 1, 1, size)
        ends = torch.cat([ids[:, :1], chunks[:, :, 0, 0, -1]], dim=1)
        return cls(
            between_tokens=chunks[..., :, None] != chunks[..., None, :],
            before_the_end=chunks != chunks[..., -1:],
            after_the_start=chunks != ends[:, :-1, None, None, None],
            between_chunks=(ends[:, :, None] != ends[:, None, :])[:, None, None],
        )


def _pass_states(added: Tensor, log_decay: Tensor, apart: Tensor | None) -> Tensor:
    """States before every chunk and after the last.

    added: [batch, chunks + 1, groups, heads, head_dim, d_state], the initial state first.
    log_decay: [batch, chunks, groups, heads], of whole chunks. apart: _Packed.between_chunks. Returns a tensor like added.
    """
    total = F.pad(_running_sum(log_decay.permute(0, 2, 3, 1)), (1, 0))
    hidden = torch.ones(total.shape[-1], total.shape[-1], dtype=torch.bool, device=total.device).triu(1)
    if apart is not None:
        hidden = hidden | apart
    decay = (total[..., :, None] - total[..., None, :]).masked_fill(hidden, float("-inf")).exp()
    flat = added.permute(0, 2, 3, 1, 4, 5)
    return (decay @ flat.flatten(-2)).view_as(flat).permute(0, 3, 1, 2, 4, 5)


def _running_sum(t: Tensor) -> Tensor:
    """Cumulative sum over the last dimension, as a product with a triangle of ones.

    torch.cumsum does not compile for small batches: Inductor (torch 2.11) fails on a scan that it splits.
    """
    n = t.shape[-1]
    return t @ torch.ones(n, n, dtype=t.dtype, device=t.device).triu()
