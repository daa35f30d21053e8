"""One token of Mamba-3's recurrence in Triton: h is read once and written once, nothing else is large."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import jit
from llmtrain.kernels.mamba3.reference import State
from llmtrain.kernels.mamba3.rotations import cos_sin
from llmtrain.kernels.mamba3.spec import Mamba3Spec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.step_triton import step_constants

_TWO_PI = tl.constexpr(6.283185307179586)
# Untuned; for AMD compiled only. Elements of h that a program takes at a time: 32 per thread on NVIDIA.
_TILE, _WARPS = 8192, {"nvidia": 8, "amd": 4}


def build(spec: Mamba3Spec, platform: Platform, variant: str) -> TritonMamba3Step:
    return TritonMamba3Step(spec, platform)


class TritonMamba3Step:
    """The signature of ReferenceMamba3Step; everything in fp32 until y is stored.

    The state is contiguous and fp32. q, k, v and what is per head may be slices of a projection: any strides, but the last dim of
    q, k, v and rate is contiguous.
    """

    def __init__(self, spec: Mamba3Spec, platform: Platform):
        self.spec, self.constants = spec, step_constants(spec, _TILE, _WARPS, platform)

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
        k_bias: Tensor, D: Tensor, state: State,
    ) -> Tensor:  # fmt: skip
        spec, batch = self.spec, v.shape[0]
        assert (
            v.shape == (batch, spec.n_heads, spec.head_dim)
            and dt.shape == log_decay.shape == later.shape == v.shape[:2]
        )
        assert q.shape == k.shape == (batch, spec.n_groups, spec.d_state) and rate.shape == (batch, spec.angles)
        assert all(t.dtype == torch.float32 and t.is_contiguous() for t in state)
        assert all(t.stride(-1) == 1 for t in (q, k, v, rate))
        assert all(t.is_contiguous() for t in (q_bias, k_bias, D))
        y = torch.empty(v.shape, dtype=v.dtype, device=v.device)
        strides = [s for t in (q, k, v, log_decay, dt, later) for s in t.stride()[:2]]
        _step[spec.n_heads, batch](
            *(q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D, *state, y, *strides, rate.stride(0)),
            ANGLES=spec.angles,
            **self.constants,
        )
        return y


@jit
def _step(
    q, k, v, log_decay, dt, later, rate, q_bias, k_bias, D, h, angle, last_k, last_v, y,
    q_row, q_group, k_row, k_group, v_row, v_head, decay_row, decay_head, dt_row, dt_head, later_row, later_head, rate_row,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (head, row of the batch): the only one that reads and writes the state of its head."""
    head, row = tl.program_id(0), tl.program_id(1)
    group, of_head = head // (N_HEADS // N_GROUPS), (row * N_HEADS + head).to(tl.int64)
    n = tl.arange(0, COLUMNS)
    inside, rotates = n < D_STATE, n < 2 * ANGLES
    q += row * q_row + group * q_group
    k += row * k_row + group * k_group
    step = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    share = tl.load(later + row * later_row + head * later_head).to(tl.float32)
    decay = tl.exp(tl.load(log_decay + row * decay_row + head * decay_head).to(tl.float32))
    now = tl.load(angle + of_head * ANGLES + n // 2, mask=rotates, other=0.0)
    now += step * tl.load(rate + row * rate_row + n // 2, mask=rotates, other=0.0).to(tl.float32)
    now -= tl.floor(now / _TWO_PI) * _TWO_PI
    cos, sin = cos_sin(now)
    sin = tl.where(n % 2 == 0, -sin, sin)
    new_q = _rotated(q, q_bias + head * D_STATE, n, inside, rotates, cos, sin)
    new_k = _rotated(k, k_bias + head * D_STATE, n, inside, rotates, cos, sin)
    old_k = tl.load(last_k + of_head * D_STATE + n, mask=inside, other=0.0) * ((1.0 - share) * step)
    skip = tl.load(D + head).to(tl.float32)
    for top in tl.static_range(0, HEAD_DIM, ROWS):
        p = top + tl.arange(0, ROWS)
        at = h + (of_head * HEAD_DIM + p)[:, None] * D_STATE + n[None, :]
        valid = (p < HEAD_DIM)[:, None] & inside[None, :]
        state = tl.load(at, mask=valid, other=0.0)
        old_v = tl.load(last_v + of_head * HEAD_DIM + p, mask=p < HEAD_DIM, other=0.0)
        new_v = tl.load(v + row * v_row + head * v_head + p, mask=p < HEAD_DIM, other=0.0).to(tl.float32)
        state = decay * (state + old_v[:, None] * old_k[None, :]) + (share * step * new_v)[:, None] * new_k[None, :]
        out = tl.sum(state * new_q[None, :], 1) + skip * new_v
        tl.store(y + of_head * HEAD_DIM + p, out.to(y.dtype.element_ty), mask=p < HEAD_DIM)
        # Threads may load the same number: none before all have.
        tl.debug_barrier()
        tl.store(at, state, mask=valid)
        tl.store(last_v + of_head * HEAD_DIM + p, new_v, mask=p < HEAD_DIM)
    tl.debug_barrier()
    tl.store(last_k + of_head * D_STATE + n, new_k, mask=inside)
    tl.store(angle + of_head * ANGLES + n // 2, now, mask=rotates & (n % 2 == 0))


@triton.jit
def _rotated(x, bias, n, inside, rotates, cos, sin):
    """Channels n, biased and rotated with their neighbours."""
    own = tl.load(x + n, mask=inside, other=0.0).to(tl.float32) + tl.load(bias + n, mask=inside, other=0.0).to(
        tl.float32
    )
    other = n ^ 1
    of_pair = tl.load(x + other, mask=rotates, other=0.0).to(tl.float32)
    of_pair += tl.load(bias + other, mask=rotates, other=0.0).to(tl.float32)
    return tl.where(rotates, own * cos + of_pair * sin, own)
