"""Outputs of tokens, from the state before their chunk and from what was written in the chunk."""

import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside
from llmtrain.kernels.launch import jit


@jit
def chunk_outputs_kernel(
    q_start, scores, weights, states, errors, y,
    T, chunks, padded,
    H: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BK: tl.constexpr, BV: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y = q_start @ state + scores @ (beta errors), [rows, T, H, V]."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, e = tl.arange(0, C), tl.program_id(0) * BV + tl.arange(0, BV)
    there = o < T - chunk * C
    out = (row * T + chunk.to(tl.int64) * C) * H + head
    of_values, to = there[:, None] & inside(e, V, BV)[None, :], out * V + o[:, None] * (H * V) + e[None, :]
    states += ((row * chunks + chunk) * H + head) * K * V
    dtype = y.dtype.element_ty
    b = tl.load(weights + (row * H + head) * padded + chunk * C + o)
    read = tl.load(scores + out * C + o[:, None] * (H * C) + o[None, :], mask=there[:, None], other=0.0)
    error = tl.load(errors + to, mask=of_values, other=0.0)
    found = tl.dot(read, (error * b[:, None]).to(dtype), input_precision=PRECISION)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        of_keys, of_state = (
            there[:, None] & inside(c, K, BK)[None, :],
            inside(c, K, BK)[:, None] & inside(e, V, BV)[None, :],
        )
        queries = tl.load(q_start + out * K + o[:, None] * (H * K) + c[None, :], mask=of_keys, other=0.0)
        state = tl.load(states + c[:, None] * V + e[None, :], mask=of_state, other=0.0)
        found = tl.dot(queries, state, found, input_precision=PRECISION)
    tl.store(y + to, found.to(dtype), mask=of_values)
