"""Decays between the tokens of a chunk, by channel, as factors of matrix products.

The decay from token j to token i > j is exp(G_i - G_j), G being the running sum of log_decay. A block of tokens is halved: between
a token of its second half and one of its first the decay is exp(G_i - G_m) exp(G_m - G_j), m being the last token of the first
half. Neither exponent is above 0, so nothing overflows, however strong the decay. Each pair of tokens meets in one such block,
of 2 to C tokens; blocks of up to 16 tokens are multiplied side by side.
"""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import load_documents

NEAR = tl.constexpr(16)
"""Tokens of the blocks that are multiplied side by side: the shortest side of a product."""
LEAST = tl.constexpr(-100.0)
"""Logarithm of a token's decay below which it counts as this: exp of either is 0 in fp32, and sums of less would lose digits."""


@triton.jit
def to_middle(G, C: tl.constexpr, S: tl.constexpr, BK: tl.constexpr):
    """Decays between each token and the middle of its block of S, [C, BK], from running sums of the chunk, [C, BK]."""
    blocks = tl.reshape(G, (C // S, S, BK))
    r = tl.arange(0, S)
    middle = tl.sum(tl.where(r[None, :, None] == S // 2 - 1, blocks, 0.0), 1)
    return tl.reshape(tl.exp(-tl.abs(blocks - middle[:, None, :])), (C, BK))


@triton.jit
def met(i, j, S: tl.constexpr):
    """True where i > j are of the second and of the first half of one block of S."""
    return (i // S == j // S) & (i // (S // 2) > j // (S // 2))


@triton.jit
def side_by_side(t, C: tl.constexpr, BK: tl.constexpr):
    """[C, BK] -> [C / 16, 16, BK]"""
    return tl.reshape(t, (C // NEAR, NEAR, BK))


@triton.jit
def on_diagonal(near, C: tl.constexpr):
    """[C / 16, 16, 16] -> the blocks on the diagonal of zeros, [C, C]."""
    N: tl.constexpr = C // NEAR
    n = tl.arange(0, N)
    same = n[:, None, None, None] == n[None, None, :, None]
    return tl.reshape(tl.where(same, near[:, :, None, :], 0.0), (C, C))


@triton.jit
def of_diagonal(square, C: tl.constexpr):
    """The inverse of on_diagonal."""
    N: tl.constexpr = C // NEAR
    n = tl.arange(0, N)
    same = n[:, None, None, None] == n[None, None, :, None]
    return tl.sum(tl.where(same, tl.reshape(square, (N, NEAR, N, NEAR)), 0.0), 2)


@triton.jit
def seen_pairs(ids, row, chunk, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """True where token i down sees token j across: j <= i, of the same document; [C, C]."""
    o = tl.arange(0, C)
    seen = o[:, None] >= o[None, :]
    if DOCUMENTS:
        own, _, _ = load_documents(ids, row, chunk, T, C)
        seen = seen & (own[:, None] == own[None, :])
    return seen


@triton.jit
def of_borders(G, total, ids, row, chunk, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Decays from the start of the chunk to each token and from each token to its end, [C, BK], and of the whole chunk, [BK], from
    running sums and their last: 0 across the border of a document."""
    from_start, to_end, whole = tl.exp(G), tl.exp(total[None, :] - G), tl.exp(total)
    if DOCUMENTS:
        own, before, last = load_documents(ids, row, chunk, T, C)
        from_start = tl.where((own == before)[:, None], from_start, 0.0)
        to_end = tl.where((own == last)[:, None], to_end, 0.0)
        whole = tl.where(before == last, whole, 0.0)
    return from_start, to_end, whole
