"""Weights and running decays of Mamba-3's tokens for the kernels of Mamba-2's scan, and their gradients.

A token j weighs own_j = l_j dt_j in its own output, and own_j + (1 - l_(j+1)) dt_(j+1) in those of later tokens of its document:
the next token reads it once more. Numbers per token and head, as in ssd/chunk_cumsum.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.chunk_cumsum import load_documents, load_terms, log_decay_gradient

_HEADS_PER_PROGRAM = 16


def decays_fwd(
    log_decay: Tensor, dt: Tensor, later: Tensor, document_ids: Tensor | None, chunk: int, with_largest: bool, parts: int,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Results of chunk_cumsum_fwd, with a token's weight for later ones in place of dt. log_decay, dt, later: [batch, T, heads],
    fp32 and contiguous; document_ids: [batch, T], int32."""
    batch, seq_len, n_heads = dt.shape[0], dt.shape[1], parts * dt.shape[2]
    chunks, new = cdiv(seq_len, chunk), {"dtype": torch.float32, "device": dt.device}
    dA_cumsum = torch.empty((batch, n_heads, chunks, 2, chunk), **new)
    largest = torch.empty((batch, n_heads, chunks), **new) if with_largest else None
    seq_idx = None
    if document_ids is not None:
        seq_idx = torch.empty(batch, chunks * chunk, dtype=torch.int32, device=dt.device)
    _decays[cdiv(n_heads, _HEADS_PER_PROGRAM), chunks, batch](
        *(log_decay, dt, later, document_ids, dA_cumsum, largest, seq_idx, seq_len, n_heads),
        CHUNK=chunk, HEAD_PARTS=parts, HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM, num_warps=4,
    )  # fmt: skip
    return dA_cumsum, largest, seq_idx


def decays_bwd(
    dt: Tensor, later: Tensor, document_ids: Tensor | None, dA_cumsum: Tensor, ddA_terms: Tensor, ddA_state: Tensor,
    ddA_blocks: Tensor | None, chunk: int,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of log_decay, of tokens' weights for later ones, and of their factors in their own outputs, like dt.
    dA_cumsum and further: as chunk_cumsum_bwd takes them."""
    batch, seq_len, n_heads = dt.shape
    found = [torch.empty_like(dt) for _ in range(3)]
    _decays_bwd[cdiv(n_heads, _HEADS_PER_PROGRAM), ddA_terms.shape[2], batch](
        *(dt, later, document_ids, dA_cumsum, ddA_terms, ddA_state, ddA_blocks, *found, seq_len, n_heads),
        CHUNK=chunk,
        PARTS=ddA_state.shape[2],
        DSTATE_BLOCKS=1 if ddA_blocks is None else ddA_blocks.shape[3],
        HEAD_PARTS=ddA_terms.shape[1] // n_heads,
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return found[0], found[1], found[2]


@jit
def _decays(
    log_decay, dt, later, document_ids, dA_cumsum, largest, seq_idx, seq_len, n_heads,
    CHUNK: tl.constexpr, HEAD_PARTS: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, chunk, row of the batch)."""
    block, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, h = chunk * CHUNK + tl.arange(0, CHUNK), block * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    inside, chunks = (h < n_heads)[None, :], tl.num_programs(1)
    valid = (t < seq_len)[:, None] & inside
    # 2^-160 is 0 in fp32; sums of larger exponents would lose the small ones.
    at = (row * seq_len + t)[:, None] * (n_heads // HEAD_PARTS) + (h // HEAD_PARTS)[None, :]
    decay = tl.maximum(tl.load(log_decay + at, mask=valid, other=0.0) * 1.4426950408889634, -160.0)  # log2(e)
    weight = _weights(dt, later, document_ids, at, row, t, valid, seq_len, n_heads // HEAD_PARTS)
    dA_cumsum += (((row * n_heads + h) * chunks + chunk) * (2 * CHUNK))[None, :] + tl.arange(0, CHUNK)[:, None]
    tl.store(dA_cumsum, tl.cumsum(decay, 0), mask=inside)
    tl.store(dA_cumsum + CHUNK, weight, mask=inside)
    if largest is not None:
        tl.store(largest + (row * n_heads + h) * chunks + chunk, tl.max(weight, 0), mask=h < n_heads)
    if document_ids is not None and block == 0:
        this, last = load_documents(document_ids, row, t, seq_len)
        tl.store(seq_idx + row * (chunks * CHUNK) + t, tl.cumsum((this != last).to(tl.int32), 0))


@jit
def _decays_bwd(
    dt, later, document_ids, dA_cumsum, ddA_terms, ddA_state, ddA_blocks, d_log_decay, d_weight, d_skip, seq_len, n_heads,
    CHUNK: tl.constexpr, PARTS: tl.constexpr, DSTATE_BLOCKS: tl.constexpr, HEAD_PARTS: tl.constexpr,
    HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, chunk, row of the batch)."""
    block, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    q, chunks = tl.arange(0, CHUNK), tl.num_programs(1)
    t, h = chunk * CHUNK + q, block * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    valid = (t < seq_len)[:, None] & (h < n_heads)[None, :]
    at = (row * seq_len + t)[:, None] * n_heads + h[None, :]
    weight = _weights(dt, later, document_ids, at, row, t, valid, seq_len, n_heads)
    of_head = (row * n_heads + h) * (HEAD_PARTS * chunks) + chunk
    earlier, after_pairs, same, after = load_terms(
        ddA_terms, dA_cumsum, ddA_blocks, of_head, q[:, None], valid, chunks, CHUNK, DSTATE_BLOCKS, HEAD_PARTS
    )
    d_decay = log_decay_gradient(
        earlier, after_pairs, after, weight, ddA_state, h, h < n_heads, row, chunk, chunks, n_heads, PARTS, HEAD_PARTS
    )
    tl.store(d_log_decay + at, d_decay, mask=valid)
    tl.store(d_weight + at, after_pairs + after, mask=valid)
    tl.store(d_skip + at, same, mask=valid)


@triton.jit
def _weights(dt, later, document_ids, at, row, t, valid, seq_len, n_heads):
    """Weights of tokens for later ones, [tokens, heads]; 0 where it is not valid. at: their places in dt."""
    followed = (t < seq_len - 1)[:, None] & valid
    if document_ids is not None:
        next_one, this = load_documents(document_ids, row, t + 1, seq_len)
        followed = followed & (next_one == this)[:, None]
    own = tl.load(dt + at, mask=valid, other=0.0) * tl.load(later + at, mask=valid, other=0.0)
    after, share = (
        tl.load(dt + at + n_heads, mask=followed, other=0.0),
        tl.load(later + at + n_heads, mask=followed, other=0.0),
    )
    return own + (1.0 - share) * after
