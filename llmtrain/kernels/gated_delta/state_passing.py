"""The states between chunks, one chunk after another, and in reverse their gradients."""

from __future__ import annotations

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import boundary_decays, load_decays


@triton.jit
def state_passing_kernel(
    k, w, u, log_decay, ids, initial, states, written, final,
    T, chunks, k_row, k_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> states before each chunk [rows, chunks, H, K, V]; what each token writes, u - w @ state, [rows, T, H, V]; the last
    state [rows, H, K, V] in fp32. KP: K rounded up to a power of two."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, c, e = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    of_state = (c < K)[:, None] & (e < V)[None, :]
    at = c[:, None] * V + e[None, :]
    k += row * k_row + (head // SHARE) * K
    dtype = k.dtype.element_ty
    state = tl.zeros((KP, BV), dtype=tl.float32)
    if INITIAL:
        state = tl.load(initial + (row * H + head) * K * V + at, mask=of_state, other=0.0).to(tl.float32)
    for chunk in range(chunks):
        t = chunk * C + o
        there = t < T
        out = (row * T + t) * H + head
        narrow = state.to(dtype)
        tl.store(states + ((row * chunks + chunk) * H + head) * K * V + at, narrow, mask=of_state)
        of_keys, of_values = there[:, None] & (c < K)[None, :], there[:, None] & (e < V)[None, :]
        less = tl.load(w + out[:, None] * K + c[None, :], mask=of_keys, other=0.0)
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
        new = tl.load(u + out[:, None] * V + e[None, :], mask=of_values, other=0.0).to(tl.float32)
        new -= tl.dot(less, narrow, input_precision=PRECISION)
        tl.store(written + out[:, None] * V + e[None, :], new.to(dtype), mask=of_values)
        g, total = load_decays(log_decay, row, head, chunk, T, H, C)
        _, to_end, whole = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
        state = tl.dot(tl.trans(keys), (new * to_end[:, None]).to(dtype), state * whole, input_precision=PRECISION)
    tl.store(final + (row * H + head) * K * V + at, state, mask=of_state)


@triton.jit
def state_passing_bwd_kernel(
    q, k, w, dy, log_decay, ids, d_written, d_final, d_states, d_initial,
    T, chunks, q_row, q_token, k_row, k_token, dy_row, dy_token,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    KP: tl.constexpr, BV: tl.constexpr, DOCUMENTS: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """d_written [rows, T, H, V]: on entry what comes from the outputs of the same chunk, and after it all -> the gradients of
    the states after each chunk [rows, chunks, H, K, V], and of the first one."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, c, e = tl.arange(0, C), tl.arange(0, KP), tl.program_id(0) * BV + tl.arange(0, BV)
    of_state = (c < K)[:, None] & (e < V)[None, :]
    at = c[:, None] * V + e[None, :]
    q += row * q_row + (head // SHARE) * K
    k += row * k_row + (head // SHARE) * K
    dy += row * dy_row + head * V
    dtype = k.dtype.element_ty
    d_state = tl.zeros((KP, BV), dtype=tl.float32)
    if FINAL:
        d_state = tl.load(d_final + (row * H + head) * K * V + at, mask=of_state, other=0.0).to(tl.float32)
    for n in range(chunks):
        chunk = chunks - 1 - n
        t = chunk * C + o
        there = t < T
        out = (row * T + t) * H + head
        narrow = d_state.to(dtype)
        tl.store(d_states + ((row * chunks + chunk) * H + head) * K * V + at, narrow, mask=of_state)
        of_keys, of_values = there[:, None] & (c < K)[None, :], there[:, None] & (e < V)[None, :]
        less = tl.load(w + out[:, None] * K + c[None, :], mask=of_keys, other=0.0)
        keys = tl.load(k + t[:, None] * k_token + c[None, :], mask=of_keys, other=0.0)
        queries = tl.load(q + t[:, None] * q_token + c[None, :], mask=of_keys, other=0.0)
        up = tl.load(dy + t[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        new = tl.load(d_written + out[:, None] * V + e[None, :], mask=of_values, other=0.0).to(tl.float32)
        g, total = load_decays(log_decay, row, head, chunk, T, H, C)
        from_start, to_end, whole = boundary_decays(g, total, ids, row, chunk, T, C, DOCUMENTS)
        new += tl.dot(keys, narrow, input_precision=PRECISION) * to_end[:, None]
        tl.store(d_written + out[:, None] * V + e[None, :], new.to(dtype), mask=of_values)
        up = (up * from_start[:, None]).to(dtype)
        d_state = tl.dot(tl.trans(queries), up, d_state * whole, input_precision=PRECISION)
        d_state = tl.dot(tl.trans(less), (-new).to(dtype), d_state, input_precision=PRECISION)
    if INITIAL:
        tl.store(d_initial + (row * H + head) * K * V + at, d_state, mask=of_state)
