"""Mamba-2's scan over packed requests that share prefixes, in Triton; forward only. prefix_tree.py has the schedule.

The arithmetic is that of triton_forward.py. Time steps are computed first, in a kernel of their own: computed where they are
used, every thread would compute those of many tokens.
"""

from dataclasses import dataclass, field, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.chunk_cumsum import softplus
from llmtrain.kernels.ssd.prefix_tree import ScanSchedule
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton_forward import load_tile, opaque_zero, padded


@dataclass(frozen=True)
class Launch:
    """Untuned; for AMD compiled only. chunk_size: tokens of a step; state: elements of a program's tile of the state. On Hopper a
    single stage makes the kernel read outside its shared memory (Triton 3.6, found by compute-sanitizer).
    """

    chunk_size: int
    state: int
    num_stages: int
    options: dict[str, int] = field(default_factory=lambda: {"num_warps": 4})


_LAUNCH = {
    "sm90": Launch(64, 4096, 2),
    "nvidia": Launch(32, 2048, 2),
    "amd": Launch(64, 4096, 1, {"num_warps": 4, "matrix_instr_nonkdim": 16}),
}
_HEADS_PER_PROGRAM = 16  # of a program of _prefix_tree_cumsum


def launch_for(spec: SSDSpec, platform: Platform) -> Launch:
    found = _LAUNCH.get(platform.arch) or _LAUNCH["amd" if platform.vendor == "amd" else "nvidia"]
    halvings = (spec.dtype == "float32") + (spec.d_state > 128)
    return replace(found, chunk_size=max(16, found.chunk_size >> halvings))


def prefix_tree_scan(
    x: Tensor, dt: Tensor, A: Tensor, B: Tensor, C: Tensor, D: Tensor, dt_bias: Tensor, schedule: ScanSchedule,
    spec: SSDSpec, platform: Platform,
) -> Tensor:  # fmt: skip
    """x: [1, T, heads, head_dim]; dt: [1, T, heads], before bias and softplus; A, D, dt_bias: [heads]; B, C: [1, T, groups,
    d_state], whose last dim is contiguous; schedule: in steps of the launch's chunk size.
    Returns y like x, contiguous. No gradients.
    """
    n_heads, head_dim = x.shape[2:]
    n_groups, d_state = B.shape[2:]
    assert x.shape[0] == 1 and x.stride(3) == B.stride(3) == C.stride(3) == dt.stride(2) == 1
    launch = launch_for(spec, platform)
    columns = min(padded(head_dim), 64, max(16, launch.state // padded(d_state)))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    states = torch.empty((schedule.state_slots, n_heads, d_state, head_dim), dtype=torch.float32, device=x.device)
    chunk, n_steps = schedule.segment_start.shape[1], schedule.steps.shape[0]
    dA_cumsum = torch.empty((n_heads, n_steps, 2, chunk), dtype=torch.float32, device=x.device)
    _prefix_tree_cumsum[cdiv(n_heads, _HEADS_PER_PROGRAM), n_steps](
        dt, A, dt_bias, schedule.steps, schedule.segment_start, dA_cumsum, n_heads, dt.stride(1),
        *(spec.dt_limit or (None, None)), CHUNK=chunk, HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    for programs in schedule.rounds:
        _prefix_tree_scan[cdiv(head_dim, columns) * n_heads, programs.shape[0]](
            x, B, C, D, dA_cumsum, y, programs, schedule.steps, schedule.segment_start, states,
            n_steps, x.stride(1), x.stride(2), B.stride(1), B.stride(2), C.stride(1), C.stride(2),
            N_HEADS=n_heads, HEADS_PER_GROUP=n_heads // n_groups, HEAD_DIM=head_dim, D_STATE=d_state,
            CHUNK=chunk, BLOCK_DSTATE=padded(d_state), BLOCK_HEADDIM=columns, NUM_STAGES=launch.num_stages,
            PRECISION="ieee" if platform.vendor == "amd" else "tf32x3", **launch.options,
        )  # fmt: skip
    return y


@jit
def _prefix_tree_cumsum(
    dt, A, dt_bias, steps, segment_start, dA_cumsum, n_heads, dt_token, dt_min, dt_max,
    CHUNK: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, step). dA_cumsum: [heads, steps, 2, CHUNK]: at 0 a, the running sum of log2(decay) since the
    token's segment or this step of it began; at 1 a - log2(dt), inf beyond the end: padding neither decays a state nor adds to it.
    """
    q, h = tl.arange(0, CHUNK), tl.program_id(0) * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    at = tl.program_id(1)
    first = tl.load(steps + 2 * at)
    inside = (q < tl.load(steps + 2 * at + 1) - first)[:, None] & (h < n_heads)[None, :]
    raw = tl.load(dt + (first + q).to(tl.int64)[:, None] * dt_token + h[None, :], mask=inside, other=0.0)
    step = softplus(raw.to(tl.float32) + tl.load(dt_bias + h, mask=h < n_heads, other=0.0).to(tl.float32)[None, :])
    if dt_min is not None:
        step = tl.maximum(step, dt_min)
    if dt_max is not None:
        step = tl.minimum(step, dt_max)
    step = tl.where(inside, step, 0.0)
    rate = tl.load(A + h, mask=h < n_heads, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
    begins = tl.broadcast_to(
        (tl.load(segment_start + at * CHUNK + q) == q).to(tl.int32)[:, None], (CHUNK, HEADS_PER_PROGRAM)
    )
    a, _ = tl.associative_scan((step * rate[None, :], begins), 0, _sums_of_segments)
    to = dA_cumsum + (h.to(tl.int64) * tl.num_programs(1) + at)[None, :] * (2 * CHUNK) + q[:, None]
    tl.store(to, a, mask=(h < n_heads)[None, :])
    tl.store(to + CHUNK, a - tl.log2(step), mask=(h < n_heads)[None, :])


@triton.jit
def _sums_of_segments(a, a_begins, b_tile, b_begins):
    return tl.where(b_begins > 0, b_tile, a + b_tile), a_begins | b_begins


@jit
def _prefix_tree_scan(
    x, B, C, D, dA_cumsum, y, programs, steps, segment_start, states,
    n_steps, x_token, x_head, B_token, B_group, C_token, C_group,
    N_HEADS: tl.constexpr, HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    CHUNK: tl.constexpr, BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Program (tile of a head's columns and head, row of `programs`)."""
    head = tl.program_id(0) % N_HEADS
    q, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_DSTATE)
    p = tl.program_id(0) // N_HEADS * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM)
    programs += tl.program_id(1) * 5
    begin, end, carried = tl.load(programs), tl.load(programs + 1), tl.load(programs + 2)
    before = tl.load(programs + 3)

    x += head * x_head
    y += head * HEAD_DIM
    B += head // HEADS_PER_GROUP * B_group
    C += head // HEADS_PER_GROUP * C_group
    dA_cumsum += head.to(tl.int64) * n_steps * (2 * CHUNK)
    skip = tl.load(D + head).to(tl.float32)

    states += head * (D_STATE * HEAD_DIM)
    size: tl.constexpr = N_HEADS * D_STATE * HEAD_DIM  # of the states in a slot, each [d_state, head_dim]
    state = tl.zeros((BLOCK_DSTATE, BLOCK_HEADDIM), tl.float32)
    if before >= 0:
        state = load_tile(states + before.to(tl.int64) * size, n, p, HEAD_DIM, D_STATE, HEAD_DIM)
    for i in tl.range(0, end - begin, num_stages=NUM_STAGES):
        at = begin + i
        first = tl.load(steps + 2 * at)
        left = tl.load(steps + 2 * at + 1) - first
        start = first.to(tl.int64)
        x_tile = load_tile(x + start * x_token, q, p, x_token, left, HEAD_DIM)
        b_tile = load_tile(B + start * B_token, q, n, B_token, left, D_STATE)
        c_tile = load_tile(C + start * C_token, q, n, C_token, left, D_STATE)
        a, weight = tl.load(dA_cumsum + at * (2 * CHUNK) + q), tl.load(dA_cumsum + at * (2 * CHUNK) + CHUNK + q)
        a_end = tl.load(dA_cumsum + at * (2 * CHUNK) + left - 1)
        seen = (q[:, None] >= q[None, :]) & (q[None, :] >= tl.load(segment_start + at * CHUNK + q)[:, None])
        scores = tl.dot(c_tile, tl.trans(b_tile), input_precision=PRECISION)
        scores *= tl.exp2(a[:, None] - weight[None, :])  # overflows only where it is masked
        scores = tl.where(seen, scores, 0.0).to(x_tile.dtype)
        out = tl.dot(c_tile, state.to(x_tile.dtype), input_precision=PRECISION) * tl.exp2(a)[:, None]
        out = tl.dot(scores, x_tile, acc=out, input_precision=PRECISION)
        out += skip * x_tile.to(tl.float32)
        to = y + start * (N_HEADS * HEAD_DIM) + q[:, None] * (N_HEADS * HEAD_DIM) + p[None, :]
        tl.store(to, out.to(y.dtype.element_ty), mask=(q < left)[:, None] & (p < HEAD_DIM)[None, :])

        # Short segments do not update the state.
        added = tl.where(i < carried, tl.exp2(a_end - weight), 0.0)
        weighted = (x_tile.to(tl.float32) * added[:, None]).to(x_tile.dtype)
        kept = tl.where(i < carried, tl.exp2(a_end), 1.0)
        state = tl.dot(tl.trans(b_tile), weighted, acc=state * kept, input_precision=PRECISION)
    after = tl.load(programs + 4)
    if after >= 0:
        n += opaque_zero(after.to(tl.float32))  # otherwise addresses take registers over the whole loop
        to = states + after.to(tl.int64) * size + n[:, None] * HEAD_DIM + p[None, :]
        tl.store(to, state, mask=(n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :])
