"""Decays of a chunk's tokens, by channel: their running sums, and queries and keys times them.

The decay from token j to token i > j is exp(G_i - G_j), G being the running sum of log_decay. It is computed as exp(G_i - G_m)
exp(G_m - G_j) for some token m between the two, so that products of queries and keys of many pairs are one of matrices; neither
exponent is above 0, and nothing overflows, however strong the decay. For pairs of two blocks of 16 tokens, m is the last token of
the earlier block. A block itself is halved, and its halves again: m is the last token of the first half.
"""

import triton
import triton.language as tl

from llmtrain.kernels.gated_delta.chunk_decays import inside, load_documents
from llmtrain.kernels.launch import jit

NEAR = tl.constexpr(16)
"""Tokens of a block: the shortest side of a product."""
LEVELS = tl.constexpr(4)
"""Times that a block can be halved."""
LEAST = tl.constexpr(-100.0)
"""Logarithm of a token's decay below which it counts as this: exp of either is 0 in fp32, and sums of less would lose digits."""


@triton.jit
def load_rows(x, rows, c, below, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """[rows, channels] in fp32; 0 for rows from `below` on, which are behind the text."""
    mask = (rows < below)[:, None] & inside(c, K, BK)[None, :]
    return tl.load(x + rows[:, None] * token + c[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_sums(sums, rows, c, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Running sums of rows of the chunk, also of those behind the text."""
    return tl.load(sums + rows[:, None] * token + c[None, :], mask=inside(c, K, BK)[None, :], other=0.0)


@triton.jit
def load_border(sums, block, c, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Running sums of the last token of a block, [1, BK]."""
    return tl.load(sums + (block * NEAR + NEAR - 1) * token + c, mask=inside(c, K, BK), other=0.0)[None, :]


@triton.jit
def to_middle(G, sums, block, level, c, token: tl.constexpr, K: tl.constexpr, BK: tl.constexpr):
    """Decays between each token of a block and the middle of its part of 16 >> level tokens, [16, BK]."""
    size = NEAR >> level
    middle = block * NEAR + tl.arange(0, NEAR) // size * size + size // 2 - 1
    return tl.exp(-tl.abs(G - load_sums(sums, middle, c, token, K, BK)))


@triton.jit
def met(level):
    """True where token i > j of a block are of the second and of the first half of one part of 16 >> level, [16, 16]."""
    r, size = tl.arange(0, NEAR), NEAR >> level
    part, half = r // size, r // (size // 2)
    return (part[:, None] == part[None, :]) & (half[:, None] > half[None, :])


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


@jit
def chunk_decays_kernel(
    q, k, log_decay, ids, sums, whole, q_start, k_start, k_end,
    T, padded, q_row, k_row,
    q_token: tl.constexpr, k_token: tl.constexpr,
    H: tl.constexpr, SHARE: tl.constexpr, K: tl.constexpr, C: tl.constexpr, BK: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """q, k: [rows, T, H / SHARE, K] by strides of rows and tokens -> in fp32 the running sums of log_decay in the chunk [rows,
    padded, H, K] and the decays of whole chunks [rows, chunks, H, K]; queries and keys times the decay from the start of the
    chunk, and keys times that to its end, [rows, T, H, K]. Behind the text log_decay is 0."""
    chunk, row, head = tl.program_id(1), (tl.program_id(2) // H).to(tl.int64), tl.program_id(2) % H
    o, c = tl.arange(0, C), tl.program_id(0) * BK + tl.arange(0, BK)
    begin = chunk * C
    there = (o < T - begin)[:, None] & inside(c, K, BK)[None, :]
    q += row * q_row + begin.to(tl.int64) * q_token + (head // SHARE) * K
    k += row * k_row + begin.to(tl.int64) * k_token + (head // SHARE) * K
    to, out = o[:, None] * (H * K) + c[None, :], ((row * T + begin) * H + head) * K
    found = tl.load(log_decay + out + to, mask=there, other=0.0).to(tl.float32)
    queries = tl.load(q + o[:, None] * q_token + c[None, :], mask=there, other=0.0).to(tl.float32)
    keys = tl.load(k + o[:, None] * k_token + c[None, :], mask=there, other=0.0).to(tl.float32)
    found = tl.maximum(found, LEAST)
    G, total = tl.cumsum(found, 0), tl.sum(found, 0)
    from_start, to_end, of_chunk = of_borders(G, total, ids, row, chunk, T, C, DOCUMENTS)
    tl.store(sums + ((row * padded + begin) * H + head) * K + to, G, mask=inside(c, K, BK)[None, :])
    tl.store(whole + ((row * (padded // C) + chunk) * H + head) * K + c, of_chunk, mask=inside(c, K, BK))
    dtype = q_start.dtype.element_ty
    tl.store(q_start + out + to, (queries * from_start).to(dtype), mask=there)
    tl.store(k_start + out + to, (keys * from_start).to(dtype), mask=there)
    tl.store(k_end + out + to, (keys * to_end).to(dtype), mask=there)
