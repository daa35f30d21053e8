"""Decays and documents of a chunk, as every kernel of the chunked gated delta rule needs them."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def load_decays(log_decay, row, head, chunk, T, H: tl.constexpr, C: tl.constexpr):
    """log_decay: [rows, T, H] -> its running sum in the chunk, [C], and the sum of the whole chunk."""
    t = chunk * C + tl.arange(0, C)
    found = tl.load(log_decay + (row * T + t) * H + head, mask=t < T, other=0.0).to(tl.float32)
    return tl.cumsum(found, 0), tl.sum(found, 0)


@triton.jit
def load_documents(ids, row, chunk, T, C: tl.constexpr):
    """ids: [rows, T] -> of the chunk's tokens, [C]; of the last token before it; of its last token. Behind the text: the last."""
    t = chunk * C + tl.arange(0, C)
    own = tl.load(ids + row * T + tl.minimum(t, T - 1))
    before = tl.load(ids + row * T + tl.maximum(chunk * C - 1, 0))
    last = tl.load(ids + row * T + tl.minimum(chunk * C + C, T) - 1)
    return own, before, last


@triton.jit
def boundary_decays(g, total, ids, row, chunk, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Decay from the start of the chunk to each token, [C]; from each token to its end, [C]; of the whole chunk. 0 across the
    border of a document."""
    from_start, to_end, whole = tl.exp(g), tl.exp(total - g), tl.exp(total)
    if DOCUMENTS:
        own, before, last = load_documents(ids, row, chunk, T, C)
        from_start = tl.where(own == before, from_start, 0.0)
        to_end = tl.where(own == last, to_end, 0.0)
        whole = tl.where(before == last, whole, 0.0)
    return from_start, to_end, whole


@triton.jit
def pair_decays(
    g, ids, row, chunk, T, C: tl.constexpr, STRICT: tl.constexpr, TRANSPOSED: tl.constexpr, DOCUMENTS: tl.constexpr
):
    """Decay from token j to token i >= j, [C, C] with i down and j across, or the other way round (TRANSPOSED); STRICT: i > j.
    Masked before exp: elsewhere the exponent is positive and may overflow."""
    o = tl.arange(0, C)
    if TRANSPOSED:
        exponent, later, earlier = g[None, :] - g[:, None], o[None, :], o[:, None]
    else:
        exponent, later, earlier = g[:, None] - g[None, :], o[:, None], o[None, :]
    seen = later > earlier if STRICT else later >= earlier
    if DOCUMENTS:
        own, _, _ = load_documents(ids, row, chunk, T, C)
        seen = seen & (own[:, None] == own[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, exponent, 0.0)), 0.0)
