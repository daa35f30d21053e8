"""The states between chunks, one chunk after another, and in reverse their gradients.

A program has all keys of BV values. Keys beyond BK are a second half of their own: products that are too long take more
registers than there are. What is multiplied transposed is loaded transposed, keys in both ways: only then are all loads pipelined.
"""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside, load_decays
from llmtrain.kernels.launch import jit


@triton.jit
def load_tokens(x, o, c, there, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[tokens, channels]"""
    return tl.load(x + o[:, None] * token + c[None, :], mask=there[:, None] & inside(c, K, BK)[None, :], other=0.0)


@triton.jit
def load_turned(x, o, c, there, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[channels, tokens]"""
    return tl.load(x + o[None, :] * token + c[:, None], mask=there[None, :] & inside(c, K, BK)[:, None], other=0.0)


@triton.jit
def load_state(x, c, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    mask = inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :]
    return tl.load(x + c[:, None] * V + e[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def first_state(x, c, e, GIVEN: tl.constexpr, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    """The state, or gradient, that a program begins with: that which is given, or zeros."""
    if GIVEN:
        state = load_state(x, c, e, K, V, BK, BV)
    else:
        state = tl.zeros((BK, BV), dtype=tl.float32)
    return state


@triton.jit
def store_state(x, state, c, e, K: tl.constexpr, V: tl.constexpr, BK: tl.constexpr, BV: tl.constexpr):
    mask = inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :]
    tl.store(x + c[:, None] * V + e[None, :], state, mask=mask)


@jit
def state_passing_kernel(
    k, v, transform, decays, initial, states, errors, final,
    T, chunks, padded, part, k_row, v_row, k_token: tl.constexpr, v_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> states before each chunk [rows, chunks, H, K, V]; by how much the state is wrong about each token's value when the
    token corrects it, [rows, T, H, V]; the last state [rows, H, K, V] in fp32."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    c, d = tl.arange(0, BK), BK + tl.arange(0, BK)
    k += row * k_row + (head // SHARE) * K
    v += row * v_row + head * V
    initial += (row * H + head) * K * V
    final += (row * H + head) * K * V
    dtype = k.dtype.element_ty
    state = first_state(initial, c, e, INITIAL, K, V, BK, BV)
    second = first_state(initial, d, e, INITIAL and K > BK, K, V, BK, BV)
    for chunk in range(chunks):
        begin = tl.cast(chunk, tl.int64) * C
        there = o < T - begin
        out = (row * T + begin) * H + head
        of_values = there[:, None] & inside(e, V, BV)[None, :]
        of_errors = o[:, None] * (H * V) + e[None, :]
        keys = load_tokens(k + begin * k_token, o, c, there, k_token, K, BK)
        turned_keys = load_turned(k + begin * k_token, o, c, there, k_token, K, BK)
        values = tl.load(v + begin * v_token + o[:, None] * v_token + e[None, :], mask=of_values, other=0.0)
        U = tl.load(transform + out * C + o[:, None] * (H * C) + o[None, :], mask=there[:, None], other=0.0)
        _, b, from_start, to_end, whole = load_decays(decays, row * H + head, chunk, padded, part, C)
        to = states + ((row * chunks + chunk) * H + head) * K * V
        narrow = state.to(dtype)
        store_state(to, narrow, c, e, K, V, BK, BV)
        found = tl.dot(keys, narrow, input_precision=PRECISION)
        if K > BK:
            more_keys = load_tokens(k + begin * k_token, o, d, there, k_token, K, BK)
            narrow = second.to(dtype)
            store_state(to, narrow, d, e, K, V, BK, BV)
            found = tl.dot(more_keys, narrow, found, input_precision=PRECISION)
        x = values.to(tl.float32) - from_start[:, None] * found
        error = tl.dot(U, (x * b[:, None]).to(dtype), x, input_precision=PRECISION)
        tl.store(errors + out * V + of_errors, error.to(dtype), mask=of_values)
        written = (error * (b * to_end)[:, None]).to(dtype)
        state = tl.dot(turned_keys, written, state * whole, input_precision=PRECISION)
        if K > BK:
            more_turned = load_turned(k + begin * k_token, o, d, there, k_token, K, BK)
            second = tl.dot(more_turned, written, second * whole, input_precision=PRECISION)
    store_state(final, state, c, e, K, V, BK, BV)
    if K > BK:
        store_state(final, second, d, e, K, V, BK, BV)


@jit
def state_passing_bwd_kernel(
    q, k, transform, scores, decays, dy, d_final, d_states, d_written, d_initial,
    T, chunks, padded, part, q_row, k_row, dy_row,
    q_token: tl.constexpr, k_token: tl.constexpr, dy_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> the gradients of the states after each chunk [rows, chunks, H, K, V]; of what each token writes, beta times its error,
    [rows, T, H, V]; and of the first state."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    c, d = tl.arange(0, BK), BK + tl.arange(0, BK)
    q += row * q_row + (head // SHARE) * K
    k += row * k_row + (head // SHARE) * K
    dy += row * dy_row + head * V
    d_final += (row * H + head) * K * V
    d_initial += (row * H + head) * K * V
    dtype = k.dtype.element_ty
    d_state = first_state(d_final, c, e, FINAL, K, V, BK, BV)
    second = first_state(d_final, d, e, FINAL and K > BK, K, V, BK, BV)
    for n in range(chunks):
        chunk = chunks - 1 - n
        begin = tl.cast(chunk, tl.int64) * C
        there = o < T - begin
        out = (row * T + begin) * H + head
        of_values = there[:, None] & inside(e, V, BV)[None, :]
        of_pairs, of_written = o[None, :] * (H * C) + o[:, None], o[:, None] * (H * V) + e[None, :]
        keys = load_tokens(k + begin * k_token, o, c, there, k_token, K, BK)
        turned_keys = load_turned(k + begin * k_token, o, c, there, k_token, K, BK)
        queries = load_turned(q + begin * q_token, o, c, there, q_token, K, BK)
        up = tl.load(dy + begin * dy_token + o[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        U = tl.load(transform + out * C + of_pairs, mask=there[None, :], other=0.0)
        read = tl.load(scores + out * C + of_pairs, mask=there[None, :], other=0.0)
        _, b, from_start, to_end, whole = load_decays(decays, row * H + head, chunk, padded, part, C)
        to = d_states + ((row * chunks + chunk) * H + head) * K * V
        by_outputs = tl.dot(read, up, input_precision=PRECISION)
        up = (up * from_start[:, None]).to(dtype)
        narrow = d_state.to(dtype)
        store_state(to, narrow, c, e, K, V, BK, BV)
        d_new = tl.dot(keys, narrow, input_precision=PRECISION)
        d_state = tl.dot(queries, up, d_state * whole, input_precision=PRECISION)
        if K > BK:
            more_keys = load_tokens(k + begin * k_token, o, d, there, k_token, K, BK)
            more_queries = load_turned(q + begin * q_token, o, d, there, q_token, K, BK)
            narrow = second.to(dtype)
            store_state(to, narrow, d, e, K, V, BK, BV)
            d_new = tl.dot(more_keys, narrow, d_new, input_precision=PRECISION)
            second = tl.dot(more_queries, up, second * whole, input_precision=PRECISION)
        d_new = d_new * to_end[:, None] + by_outputs
        d_new = tl.dot(U, (d_new * b[:, None]).to(dtype), d_new, input_precision=PRECISION)
        tl.store(d_written + out * V + of_written, d_new.to(dtype), mask=of_values)
        less = (d_new * (-b * from_start)[:, None]).to(dtype)
        d_state = tl.dot(turned_keys, less, d_state, input_precision=PRECISION)
        if K > BK:
            more_turned = load_turned(k + begin * k_token, o, d, there, k_token, K, BK)
            second = tl.dot(more_turned, less, second, input_precision=PRECISION)
    if INITIAL:
        store_state(d_initial, d_state, c, e, K, V, BK, BV)
        if K > BK:
            store_state(d_initial, second, d, e, K, V, BK, BV)
