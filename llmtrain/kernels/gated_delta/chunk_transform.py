"""The triangular system of a chunk (the UT transform; Yang et al., arXiv:2412.06464, section 3.3), and its decays.

Token i finds the state wrong by x_i = v_i - from_start_i k_i S when no token of its chunk has written yet, and by e_i when those
before it have: e = x - A beta e, A_ij = (k_i . k_j) decay_ij for i > j. So e = x + U beta x with U = -(I + A beta)^-1 A, strictly
lower triangular; in the backward pass its transpose solves the same system in reverse. No division by beta, which may be 0.
"""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside, load_documents, pair_decays
from llmtrain.kernels.launch import jit

_BLOCK = tl.constexpr(16)


@triton.jit
def solve_blocks(diagonal, beta, C: tl.constexpr):
    """U of each block of 16 tokens alone, from its A, [C / 16, 16, 16]: u_i = -a_i - sum over m < i of a_im beta_m u_m, row by
    row."""
    N: tl.constexpr = C // _BLOCK
    r = tl.arange(0, _BLOCK)
    weights = tl.reshape(beta, (N, _BLOCK))
    solved = -diagonal
    for i in range(2, _BLOCK):
        this = r[None, :, None] == i
        a = tl.sum(tl.where(this, diagonal, 0.0), 1) * weights
        row = tl.sum(tl.where(this, solved, -a[:, :, None] * solved), 1)
        solved = tl.where(this, row[:, None, :], solved)
    return solved


@triton.jit
def join_blocks(U, below, beta, C: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr):
    """U of blocks of S tokens, [C / S, S, S], -> of blocks of 2 S. below: see square_below."""
    N: tl.constexpr = C // S // 2
    d = tl.arange(0, 2)
    by_pair, square = tl.reshape(U, (N, 2, S, S)), square_below(U, below, beta, C, S, PRECISION)
    down, across = d[None, :, None, None, None], d[None, None, None, :, None]
    joined = tl.where(down == across, by_pair[:, :, :, None, :], 0.0)
    joined = tl.where(down > across, square[:, None, :, None, :], joined)
    return tl.reshape(joined, (N, 2 * S, 2 * S))


@triton.jit
def square_below(U, below, beta, C: tl.constexpr, S: tl.constexpr, PRECISION: tl.constexpr):
    """Square below the diagonal of U in blocks of 2 S, -(I + U_1 beta_1) A_10 (I + beta_0 U_0), from U of blocks of S tokens,
    [C / S, S, S], and A_10, `below`, [C / S / 2, S, S]."""
    N: tl.constexpr = C // S // 2
    d = tl.arange(0, 2)
    by_pair, weights = tl.reshape(U, (N, 2, S, S)), tl.reshape(beta, (N, 2, S))
    first, second = d[None, :, None, None] == 0, d[None, :, None] == 0
    U_0 = tl.sum(tl.where(first, by_pair, 0.0), 1)
    U_1 = tl.sum(tl.where(first, 0.0, by_pair), 1)
    beta_0 = tl.sum(tl.where(second, weights, 0.0), 1)
    beta_1 = tl.sum(tl.where(second, 0.0, weights), 1)
    below += tl.dot(below * beta_0[:, None, :], U_0, input_precision=PRECISION)
    return -(below + tl.dot(U_1 * beta_1[:, None, :], below, input_precision=PRECISION))


@triton.jit
def _on_diagonal(A, C: tl.constexpr):
    """Blocks of 16 on the diagonal of A, [C / 16, 16, 16]."""
    N: tl.constexpr = C // _BLOCK
    n = tl.arange(0, N)
    blocks = tl.reshape(A, (N, _BLOCK, N, _BLOCK))
    return tl.sum(tl.where(n[:, None, None, None] == n[None, None, :, None], blocks, 0.0), 2)


@triton.jit
def _below(A, C: tl.constexpr, S: tl.constexpr):
    """The squares below the diagonal of A in its blocks of 2 S, [C / S / 2, S, S]."""
    N: tl.constexpr = C // S // 2
    n, d = tl.arange(0, N), tl.arange(0, 2)
    pairs = tl.reshape(A, (N, 2, S, N, 2, S))
    same = n[:, None, None, None, None, None] == n[None, None, None, :, None, None]
    lower, left = d[None, :, None, None, None, None] == 1, d[None, None, None, None, :, None] == 0
    return tl.sum(tl.sum(tl.sum(tl.where(same & lower & left, pairs, 0.0), 4), 3), 1)


@jit
def chunk_transform_kernel(
    k, log_decay, beta, ids, transform, decays,
    T, padded, part, k_row,
    k_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr,
    DOCUMENTS: tl.constexpr, PRECISION: tl.constexpr, SOLVE_PRECISION: tl.constexpr,
):  # fmt: skip
    """k: [rows, T, H / SHARE, K] by strides of rows and tokens -> U, [rows, T, H, C]; in fp32, `part` apart, [rows, H, padded]:
    the running sums of log_decay in the chunk, beta, and the decays from the start of the chunk and to its end, which are 0
    across the border of a document. Behind the text log_decay and beta are 0."""
    chunk, row, head = tl.program_id(0), (tl.program_id(1) // H).to(tl.int64), tl.program_id(1) % H
    o = tl.arange(0, C)
    begin = chunk * C
    there = o < T - begin
    out = (row * T + begin) * H + head
    found = tl.load(log_decay + out + o * H, mask=there, other=0.0).to(tl.float32)
    b = tl.load(beta + out + o * H, mask=there, other=0.0).to(tl.float32)
    g, total = tl.cumsum(found, 0), tl.sum(found, 0)
    from_start, to_end = tl.exp(g), tl.exp(total - g)
    if DOCUMENTS:
        own, before, last = load_documents(ids, row, chunk, T, C)
        from_start = tl.where(own == before, from_start, 0.0)
        to_end = tl.where(own == last, to_end, 0.0)
    decays += (row * H + head) * padded + begin + o
    tl.store(decays, g)
    tl.store(decays + part, b)
    tl.store(decays + 2 * part, from_start)
    tl.store(decays + 3 * part, to_end)

    k += row * k_row + begin.to(tl.int64) * k_token + (head // SHARE) * K
    products = tl.zeros((C, C), dtype=tl.float32)
    for first in range(0, K, BK):
        c = first + tl.arange(0, BK)
        keys = tl.load(
            k + o[:, None] * k_token + c[None, :], mask=there[:, None] & inside(c, K, BK)[None, :], other=0.0
        )
        products = tl.dot(keys, tl.trans(keys), products, input_precision=PRECISION)
    A = tl.where(o[:, None] > o[None, :], products * pair_decays(g, ids, row, chunk, T, C, DOCUMENTS), 0.0)
    U = solve_blocks(_on_diagonal(A, C), b, C)
    if C > 16:
        U = join_blocks(U, _below(A, C, 16), b, C, 16, SOLVE_PRECISION)
    if C > 32:
        U = join_blocks(U, _below(A, C, 32), b, C, 32, SOLVE_PRECISION)
    U = tl.reshape(U, (C, C))
    tl.store(
        transform + out * C + o[:, None] * (H * C) + o[None, :], U.to(transform.dtype.element_ty), mask=there[:, None]
    )
