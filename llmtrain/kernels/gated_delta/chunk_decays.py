"""Decays and documents of a chunk, as every kernel of the chunked gated delta rule needs them."""

import triton
import triton.language as tl


@triton.jit
def inside(channels, size: tl.constexpr, BLOCK: tl.constexpr):
    """Mask of channels below `size`, of blocks that begin at its multiples. Where all blocks are whole the compiler drops it."""
    if size % BLOCK == 0:
        return tl.full(channels.shape, True, tl.int1)
    else:
        return channels < size


@triton.jit
def load_documents(ids, row, chunk, T, C: tl.constexpr):
    """ids: [rows, T] -> of the chunk's tokens, [C]; of the last token before it; of its last token. Behind the text: the last."""
    t = chunk * C + tl.arange(0, C)
    own = tl.load(ids + row * T + tl.minimum(t, T - 1))
    before = tl.load(ids + row * T + tl.maximum(chunk * C - 1, 0))
    last = tl.load(ids + row * T + tl.minimum(chunk * C + C, T) - 1)
    return own, before, last


@triton.jit
def load_decays(decays, of_head, chunk, padded, part, C: tl.constexpr):
    """Values of a chunk's tokens as chunk_transform_kernel wrote them, [C] each: the running sum of log_decay, beta, the decay
    from the start of the chunk to each token, and from each token to its end; and the decay of the whole chunk."""
    at = decays + of_head * padded + chunk * C + tl.arange(0, C)
    whole = tl.load(decays + 2 * part + of_head * padded + chunk * C + C - 1)
    return tl.load(at), tl.load(at + part), tl.load(at + 2 * part), tl.load(at + 3 * part), whole


@triton.jit
def pair_decays(g, ids, row, chunk, T, C: tl.constexpr, DOCUMENTS: tl.constexpr):
    """Decay from token j to token i >= j, [C, C] with i down and j across; 0 above the diagonal and between documents.
    Masked before exp: above the diagonal the exponent is positive and may overflow."""
    o = tl.arange(0, C)
    seen = o[:, None] >= o[None, :]
    if DOCUMENTS:
        own, _, _ = load_documents(ids, row, chunk, T, C)
        seen = seen & (own[:, None] == own[None, :])
    return tl.where(seen, tl.exp(tl.where(seen, g[:, None] - g[None, :], 0.0)), 0.0)
