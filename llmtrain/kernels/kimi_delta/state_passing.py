"""The states between chunks, one chunk after another, and in reverse their gradients.

A program has all keys of BV values. What is multiplied transposed is loaded transposed: only then are all loads pipelined. Queries
and keys come with their decays; names are as in gated_delta/state_passing.py.
"""

import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside
from llmtrain.kernels.gated_delta.state_passing import first_state, load_tokens, load_turned, store_state
from llmtrain.kernels.launch import jit


@jit
def state_passing_kernel(
    k_start, k_end, v, transform, weights, whole, initial, states, errors, final,
    T, chunks, padded, v_row, v_token: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> states before each chunk [rows, chunks, H, K, V]; by how much the state is wrong about each token's value when the
    token corrects it, [rows, T, H, V]; the last state [rows, H, K, V] in fp32."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, e, c = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BK)
    v += row * v_row + head * V
    initial += (row * H + head) * K * V
    final += (row * H + head) * K * V
    dtype = k_start.dtype.element_ty
    state = first_state(initial, c, e, INITIAL, K, V, BK, BV)
    for chunk in range(chunks):
        begin = tl.cast(chunk, tl.int64) * C
        there = o < T - begin
        out = (row * T + begin) * H + head
        of_chunk = (row * chunks + chunk) * H + head
        of_values = there[:, None] & inside(e, V, BV)[None, :]
        keys = load_tokens(k_start + out * K, o, c, there, H * K, K, BK)
        turned_keys = load_turned(k_end + out * K, o, c, there, H * K, K, BK)
        values = tl.load(v + begin * v_token + o[:, None] * v_token + e[None, :], mask=of_values, other=0.0)
        U = tl.load(transform + out * C + o[:, None] * (H * C) + o[None, :], mask=there[:, None], other=0.0)
        b = tl.load(weights + (row * H + head) * padded + begin + o)
        decay = tl.load(whole + of_chunk * K + c, mask=inside(c, K, BK), other=0.0)
        narrow = state.to(dtype)
        store_state(states + of_chunk * K * V, narrow, c, e, K, V, BK, BV)
        x = values.to(tl.float32) - tl.dot(keys, narrow, input_precision=PRECISION)
        error = tl.dot(U, (x * b[:, None]).to(dtype), x, input_precision=PRECISION)
        tl.store(errors + out * V + o[:, None] * (H * V) + e[None, :], error.to(dtype), mask=of_values)
        written = (error * b[:, None]).to(dtype)
        state = tl.dot(turned_keys, written, state * decay[:, None], input_precision=PRECISION)
    store_state(final, state, c, e, K, V, BK, BV)


@jit
def state_passing_bwd_kernel(
    q_start, k_start, k_end, transform, scores, weights, whole, errors, dy, d_final, d_states, d_written, d_beta, d_initial,
    T, chunks, padded, tokens, dy_row, dy_token: tl.constexpr,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, FINAL: tl.constexpr, INITIAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """-> the gradients of the states after each chunk [rows, chunks, H, K, V]; of what each token writes, beta times its error,
    [rows, T, H, V]; and of the first state. d_beta: the part of this program's values, [rows, T, H] in fp32, `tokens` apart."""
    row, head = (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o, e, c = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV), tl.arange(0, BK)
    dy += row * dy_row + head * V
    d_final += (row * H + head) * K * V
    d_initial += (row * H + head) * K * V
    dtype = k_start.dtype.element_ty
    d_state = first_state(d_final, c, e, FINAL, K, V, BK, BV)
    for n in range(chunks):
        chunk = chunks - 1 - n
        begin = tl.cast(chunk, tl.int64) * C
        there = o < T - begin
        out = (row * T + begin) * H + head
        of_chunk = (row * chunks + chunk) * H + head
        of_values, of_pairs = there[:, None] & inside(e, V, BV)[None, :], o[None, :] * (H * C) + o[:, None]
        keys = load_tokens(k_end + out * K, o, c, there, H * K, K, BK)
        turned_keys = load_turned(k_start + out * K, o, c, there, H * K, K, BK)
        queries = load_turned(q_start + out * K, o, c, there, H * K, K, BK)
        up = tl.load(dy + begin * dy_token + o[:, None] * dy_token + e[None, :], mask=of_values, other=0.0)
        U = tl.load(transform + out * C + of_pairs, mask=there[None, :], other=0.0)
        read = tl.load(scores + out * C + of_pairs, mask=there[None, :], other=0.0)
        b = tl.load(weights + (row * H + head) * padded + begin + o)
        decay = tl.load(whole + of_chunk * K + c, mask=inside(c, K, BK), other=0.0)
        narrow = d_state.to(dtype)
        store_state(d_states + of_chunk * K * V, narrow, c, e, K, V, BK, BV)
        d_new = tl.dot(read, up, input_precision=PRECISION)
        d_new = tl.dot(keys, narrow, d_new, input_precision=PRECISION)
        d_state = tl.dot(queries, up, d_state * decay[:, None], input_precision=PRECISION)
        d_new = tl.dot(U, (d_new * b[:, None]).to(dtype), d_new, input_precision=PRECISION)
        of_written = out * V + o[:, None] * (H * V) + e[None, :]
        tl.store(d_written + of_written, d_new.to(dtype), mask=of_values)
        error = tl.load(errors + of_written, mask=of_values, other=0.0).to(tl.float32)
        tl.store(d_beta + tl.program_id(0) * tokens + out + o * H, tl.sum(error * d_new, 1), mask=there)
        less = (d_new * -b[:, None]).to(dtype)
        d_state = tl.dot(turned_keys, less, d_state, input_precision=PRECISION)
    if INITIAL:
        store_state(d_initial, d_state, c, e, K, V, BK, BV)
