"""One token of Mamba-2's recurrence in Triton: the state is read once and written once, nothing else is large."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.chunk_cumsum import softplus
from llmtrain.kernels.ssd.spec import SSDSpec

# Untuned; for AMD compiled only. Elements of the state per program, 16 per thread on NVIDIA.
_TILE, _WARPS = 2048, {"nvidia": 4, "amd": 2}


def build(spec: SSDSpec, platform: Platform, variant: str) -> TritonSSDStep:
    return TritonSSDStep(spec, platform)


class TritonSSDStep:
    """The signature of ReferenceSSDStep; everything in fp32 until y is stored.

    The state is contiguous and fp32. x, dt, B and C may be slices of a projection: any strides, but the last dim of
    x, B and C is contiguous.
    """

    def __init__(self, spec: SSDSpec, platform: Platform):
        self.spec, self.constants = spec, step_constants(spec, _TILE, _WARPS, platform)

    def __call__(
        self, x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, state: Tensor,
    ) -> Tensor:  # fmt: skip
        spec = self.spec
        batch = x.shape[0]
        assert x.shape == (batch, spec.n_heads, spec.head_dim) and dt.shape == (batch, spec.n_heads)
        assert B.shape == C.shape == (batch, spec.n_groups, spec.d_state)
        assert state.shape == (batch, spec.n_heads, spec.head_dim, spec.d_state)
        assert state.dtype == torch.float32 and state.is_contiguous()
        assert x.stride(2) == B.stride(2) == C.stride(2) == 1
        assert A.is_contiguous() and D.is_contiguous() and dt_bias.is_contiguous()

        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        strides = [s for t in (x, dt, B, C) for s in t.stride()[:2]]
        _step[cdiv(spec.head_dim, self.constants["ROWS"]), spec.n_heads, batch](
            *(x, dt, A, B, C, D, dt_bias, state, y, *strides, *(spec.dt_limit or (None, None))), **self.constants
        )
        return y


def step_constants(spec: Any, tile: int, warps: Mapping[str, int], platform: Platform) -> dict[str, int]:
    """Constants of a kernel of one token, and its warps. spec: a specification of the scan; tile: elements of a head's state,
    [ROWS, COLUMNS], that a program takes at a time; warps: by vendor."""
    columns = next_power_of_2(spec.d_state)
    return {
        "N_HEADS": spec.n_heads, "N_GROUPS": spec.n_groups, "HEAD_DIM": spec.head_dim, "D_STATE": spec.d_state,
        "ROWS": min(next_power_of_2(spec.head_dim), max(1, tile // columns)), "COLUMNS": columns,
        "num_warps": warps["amd" if platform.vendor == "amd" else "nvidia"],
    }  # fmt: skip


@jit
def _step(
    x, dt, A, B, C, D, dt_bias, state, y, x_row, x_head, dt_row, dt_head, B_row, B_group, C_row, C_group, dt_min,
    dt_max, N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program (tile of head_dim, head, row of the batch)."""
    tile, head, row = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    group = head // (N_HEADS // N_GROUPS)
    p, n = tile * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    p_valid, n_valid = p < HEAD_DIM, n < D_STATE
    valid = p_valid[:, None] & n_valid[None, :]

    # The state first: it is what takes time to arrive.
    at = (row * N_HEADS + head).to(tl.int64) * HEAD_DIM * D_STATE
    state += at + p[:, None] * D_STATE + n[None, :]
    h = tl.load(state, mask=valid, other=0.0)
    x_in = tl.load(x + row * x_row + head * x_head + p, mask=p_valid, other=0.0).to(tl.float32)
    B_in = tl.load(B + row * B_row + group * B_group + n, mask=n_valid, other=0.0).to(tl.float32)
    C_in = tl.load(C + row * C_row + group * C_group + n, mask=n_valid, other=0.0).to(tl.float32)
    raw = tl.load(dt + row * dt_row + head * dt_head).to(tl.float32)
    step = softplus(raw + tl.load(dt_bias + head).to(tl.float32))
    if dt_min is not None:
        step = tl.maximum(step, dt_min)
    if dt_max is not None:
        step = tl.minimum(step, dt_max)

    decay = tl.exp(step * tl.load(A + head).to(tl.float32))
    h = h * decay + (step * x_in)[:, None] * B_in[None, :]
    tl.store(state, h, mask=valid)
    out = tl.sum(h * C_in[None, :], 1) + tl.load(D + head).to(tl.float32) * x_in
    tl.store(y + (row * N_HEADS + head) * HEAD_DIM + p, out.to(y.dtype.element_ty), mask=p_valid)
