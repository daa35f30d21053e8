"""Mamba-2's state-space duality in Triton, forward: states at the chunks' borders, then all chunks at once.

Chunked form of arXiv:2405.21060, section 6. With a the running sum of log2(decay) inside a chunk, S the state before
the chunk, kept transposed, [d_state, head_dim]:

    S' = 2^a_end S + sum_j (dt_j 2^(a_end - a_j)) B_j x_j^T
    y_i = 2^a_i C_i S + sum_{j <= i} (C_i . B_j) 2^(a_i - a_j) dt_j x_j + D x_i

No exponent is positive, so nothing overflows. A document that begins at t drops the state before t: terms that cross
its beginning are masked, found by counting the beginnings within the chunk.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.triton_launch import HeadsLaunch, PassLaunch


def padded(size: int) -> int:
    """What a matrix instruction takes: a power of two from 16 on."""
    return max(16, triton.next_power_of_2(size))


def pass_states(
    values: Tensor,
    keys: Tensor,
    times: Tensor,
    begun: Tensor | None,
    start: Tensor | None,
    chunk: int,
    reverse: bool,
    precision: str,
    launch: PassLaunch,
) -> tuple[Tensor, Tensor]:
    """The states before all chunks, like values [batch, chunks, heads, d_state, head_dim], and the last, in fp32.

    values: [batch, T, heads, head_dim]; keys: [batch, T, groups, d_state]; start: [batch, heads, head_dim, d_state],
    fp32 and contiguous, as is the last state. Forward, values are x and keys B. With `reverse`, values are the gradient
    of y and keys C: what is passed, from the last chunk to the first, is the gradient of the state *after* each chunk.
    """
    batch, seq_len, n_heads, head_dim = values.shape
    n_groups, d_state = keys.shape[2:]
    chunks = times.shape[2]
    states = torch.empty((batch, chunks, n_heads, d_state, head_dim), dtype=values.dtype, device=values.device)
    last = torch.empty((batch, n_heads, head_dim, d_state), dtype=torch.float32, device=values.device)
    rows, columns = min(launch.rows, padded(d_state)), min(launch.columns, padded(head_dim))
    tiles = triton.cdiv(d_state, rows) * triton.cdiv(head_dim, columns)
    _pass_states[tiles, n_heads, batch](
        *(values, keys, times, begun, start, states, last),
        *(seq_len, chunks, *values.stride()[:3], *keys.stride()[:3]),
        HEADS_PER_GROUP=n_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        ROWS=rows,
        COLUMNS=columns,
        REVERSE=reverse,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )
    return states, last


def products(left: Tensor, right: Tensor, begun: Tensor | None, chunk: int, upper: bool, precision: str) -> Tensor:
    """left_i . right_j of the pairs in each chunk, [batch, chunks, groups, chunk, chunk] in fp32.

    left, right: [batch, T, groups, d_state]. Zero where j > i (with `upper`: where j < i) and across documents. All
    heads of a group share it; in fp32 it takes 4 * T * chunk bytes per group, which stays in the L2 cache.
    """
    batch, seq_len, n_groups, d_state = left.shape
    chunks = triton.cdiv(seq_len, chunk)
    out = torch.empty((batch, chunks, n_groups, chunk, chunk), dtype=torch.float32, device=left.device)
    _products[n_groups, chunks, batch](
        *(left, right, begun, out),
        *(seq_len, *left.stride()[:3], *right.stride()[:3]),
        D_STATE=d_state,
        CHUNK=chunk,
        ROWS=padded(d_state),
        UPPER=upper,
        PRECISION=precision,
        num_warps=8 if chunk >= 128 else 4,
    )
    return out


def scan(
    x: Tensor,
    C: Tensor,
    D: Tensor,
    times: Tensor,
    begun: Tensor | None,
    pairs: Tensor,
    states: Tensor,
    chunk: int,
    precision: str,
    launch: HeadsLaunch,
) -> Tensor:
    """y, like x but contiguous, from the products C B^T of pairs and the states before every chunk."""
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = C.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_group = n_heads // n_groups
    heads = min(launch.heads, per_group)
    _scan[n_groups * triton.cdiv(per_group, heads), times.shape[2], batch](
        *(x, C, D, times, begun, pairs, states, y),
        *(seq_len, *x.stride()[:3], *C.stride()[:3]),
        HEADS_PER_GROUP=per_group,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        ROWS=padded(d_state),
        COLUMNS=padded(head_dim),
        HEADS=heads,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )
    return y


@triton.jit
def rows_of(base, t, column, row_stride, n_rows, WIDTH: tl.constexpr):
    """A tile of a matrix whose last dim is contiguous; zeros beyond its rows and its width."""
    at = t[:, None] * row_stride + column[None, :]
    return tl.load(base + at, mask=(t < n_rows)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _pass_states(
    values,
    keys,
    times,
    begun,
    start,
    states,
    last,
    seq_len,
    chunks,
    values_row,
    values_token,
    values_head,
    keys_row,
    keys_token,
    keys_group,
    HEADS_PER_GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (tile of the state, head, row of the batch). The state stays in fp32 registers from end to end."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(1)
    ACROSS: tl.constexpr = (HEAD_DIM + COLUMNS - 1) // COLUMNS
    n = tl.program_id(0) // ACROSS * ROWS + tl.arange(0, ROWS)
    p = tl.program_id(0) % ACROSS * COLUMNS + tl.arange(0, COLUMNS)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
    q = tl.arange(0, CHUNK)

    values += row * values_row + head * values_head
    keys += row * keys_row + (head // HEADS_PER_GROUP) * keys_group
    times += (row * n_heads + head) * chunks * (2 * CHUNK)
    states += (row * chunks * n_heads + head) * (D_STATE * HEAD_DIM)
    inside = n[:, None] * HEAD_DIM + p[None, :]  # of a state that is kept transposed
    outside = (row * n_heads + head) * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE + n[:, None]

    state = tl.zeros((ROWS, COLUMNS), tl.float32)
    if start is not None:
        state = tl.load(start + outside, mask=valid, other=0.0)
    for i in tl.range(0, chunks, num_stages=STAGES):
        c = i
        if REVERSE:
            c = chunks - 1 - i
        to = states + c.to(tl.int64) * n_heads * (D_STATE * HEAD_DIM)
        tl.store(to + inside, state.to(states.dtype.element_ty), mask=valid)

        first = c * CHUNK
        v = rows_of(values + first.to(tl.int64) * values_token, q, p, values_token, seq_len - first, HEAD_DIM)
        k = rows_of(keys + first.to(tl.int64) * keys_token, q, n, keys_token, seq_len - first, D_STATE)
        a, a_end = tl.load(times + 2 * first + q), tl.load(times + 2 * first + CHUNK - 1)
        keep = tl.exp2(a_end)
        if REVERSE:
            weight = tl.exp2(a)
        else:
            weight = tl.exp2(a_end - a) * tl.load(times + 2 * first + CHUNK + q)
        if begun is not None:
            count = tl.load(begun + row * chunks * CHUNK + first + q)
            count_end = tl.load(begun + row * chunks * CHUNK + first + CHUNK - 1)
            keep = tl.where(count_end == 0, keep, 0.0)
            if REVERSE:
                weight = tl.where(count == 0, weight, 0.0)
            else:
                weight = tl.where(count == count_end, weight, 0.0)
        weighted = (v.to(tl.float32) * weight[:, None]).to(v.dtype)
        state = tl.dot(tl.trans(k), weighted, acc=state * keep, input_precision=PRECISION)
    tl.store(last + outside, state, mask=valid)


@triton.jit
def _products(
    left,
    right,
    begun,
    out,
    seq_len,
    left_row,
    left_token,
    left_group,
    right_row,
    right_token,
    right_group,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    UPPER: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Program (group, chunk, row of the batch)."""
    group, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(1)
    first = chunk * CHUNK
    q, n = tl.arange(0, CHUNK), tl.arange(0, ROWS)
    left += row * left_row + group * left_group + first.to(tl.int64) * left_token
    right += row * right_row + group * right_group + first.to(tl.int64) * right_token
    a = rows_of(left, q, n, left_token, seq_len - first, D_STATE)
    b = rows_of(right, q, n, right_token, seq_len - first, D_STATE)
    if UPPER:
        paired = q[:, None] <= q[None, :]
    else:
        paired = q[:, None] >= q[None, :]
    if begun is not None:
        count = tl.load(begun + row * chunks * CHUNK + first + q)
        paired = paired & (count[:, None] == count[None, :])
    found = tl.where(paired, tl.dot(a, tl.trans(b), input_precision=PRECISION), 0.0)
    out += ((row * chunks + chunk) * tl.num_programs(0) + group) * (CHUNK * CHUNK)
    tl.store(out + q[:, None] * CHUNK + q[None, :], found)


@triton.jit
def _scan(
    x,
    C,
    D,
    times,
    begun,
    pairs,
    states,
    y,
    seq_len,
    x_row,
    x_token,
    x_head,
    C_row,
    C_token,
    C_group,
    HEADS_PER_GROUP: tl.constexpr,
    N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr,
    CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Program (group and block of its heads, chunk, row of the batch): one head after the other."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS - 1) // HEADS
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(1)
    first = chunk * CHUNK
    q, n, p = tl.arange(0, CHUNK), tl.arange(0, ROWS), tl.arange(0, COLUMNS)

    x += row * x_row + first.to(tl.int64) * x_token
    y += (row * seq_len + first) * (N_HEADS * HEAD_DIM)
    C += row * C_row + group * C_group + first.to(tl.int64) * C_token
    times += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
    seq_len -= first  # tokens from here on

    c = rows_of(C, q, n, C_token, seq_len, D_STATE)
    pairs += ((row * chunks + chunk) * (N_HEADS // HEADS_PER_GROUP) + group) * (CHUNK * CHUNK)
    # Zero where there is no pair; the decays below are finite everywhere.
    cb = tl.load(pairs + q[:, None] * CHUNK + q[None, :])
    count = None
    if begun is not None:
        count = tl.load(begun + row * chunks * CHUNK + first + q)

    begin = group * HEADS_PER_GROUP + block * HEADS
    end = tl.minimum(begin + HEADS, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=STAGES):
        state = rows_of(states + head * (D_STATE * HEAD_DIM), n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        of_head = head * chunks * (2 * CHUNK)
        a, step = tl.load(times + of_head + q), tl.load(times + of_head + CHUNK + q)
        x_in = rows_of(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)

        decay = tl.exp2(a)
        if begun is not None:
            decay = tl.where(count == 0, decay, 0.0)
        out = tl.dot(c, state, input_precision=PRECISION) * decay[:, None]
        scores = cb * tl.exp2(tl.minimum(a[:, None] - a[None, :], 0.0)) * step[None, :]
        out = tl.dot(scores.to(x_in.dtype), x_in, acc=out, input_precision=PRECISION)
        out += tl.load(D + head).to(tl.float32) * x_in.to(tl.float32)
        to = q[:, None] * (N_HEADS * HEAD_DIM) + head * HEAD_DIM + p[None, :]
        inside = (q < seq_len)[:, None] & (p < HEAD_DIM)[None, :]
        tl.store(y + to, out.to(y.dtype.element_ty), mask=inside)
