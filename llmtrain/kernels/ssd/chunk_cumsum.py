"""Time steps of Mamba-2 in Triton: softplus and limits of dt, cumulative sums of dA per chunk, documents; and the gradients.

These kernels touch one number per token and head, 1/64 of x. They are kernels of their own so that the others read decays
in fp32 with unit stride, [batch, heads, tokens], whatever the layout of the projection that dt is a slice of.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit

_HEADS_PER_PROGRAM = 16  # 32 bytes of dt in bf16, the smallest memory transaction


def chunk_cumsum_fwd(
    dt: Tensor, A: Tensor, dt_bias: Tensor, document_ids: Tensor | None, dt_limit: tuple[float | None, float | None],
    chunk: int, with_largest_dt: bool, parts: int = 1,
) -> tuple[Tensor, Tensor | None, Tensor | None]:  # fmt: skip
    """Cumulative log-decays, time steps and document indices for the other kernels, padded to whole chunks.

    dt: [batch, T, heads], raw; document_ids: [batch, T], int32, a new number where a document begins. Returns

    - dA_cumsum, [batch, heads, chunks, 2, chunk] in fp32: at 0 the running sum of log2(decay) from the start of the chunk, at
      1 dt = clamp(softplus(dt + bias)), side by side so that one address serves both;
    - the largest dt of each chunk, [batch, heads, chunks], or None;
    - seq_idx, [batch, padded T] in int32: the documents that have begun since the start of the chunk; None without documents.

    Padding has dt = 0: it neither decays the state nor adds to it. parts: each head of dt is so many heads of the results
    (split_heads.py).
    """
    batch, seq_len, n_heads = dt.shape[0], dt.shape[1], parts * dt.shape[2]
    chunks = cdiv(seq_len, chunk)
    dA_cumsum = torch.empty((batch, n_heads, chunks, 2, chunk), dtype=torch.float32, device=dt.device)
    largest_dt, seq_idx = None, None
    if with_largest_dt:
        largest_dt = torch.empty((batch, n_heads, chunks), dtype=torch.float32, device=dt.device)
    if document_ids is not None:
        seq_idx = torch.empty(batch, chunks * chunk, dtype=torch.int32, device=dt.device)
    _chunk_cumsum_fwd[cdiv(n_heads, _HEADS_PER_PROGRAM), chunks, batch](
        *(dt, A, dt_bias, document_ids, dA_cumsum, largest_dt, seq_idx),
        *(seq_len, n_heads, *dt.stride(), *dt_limit),
        CHUNK=chunk,
        HEAD_PARTS=parts,
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        num_warps=4,
    )
    return dA_cumsum, largest_dt, seq_idx


def chunk_cumsum_bwd(
    dt: Tensor, A: Tensor, dt_bias: Tensor, dt_limit: tuple[float | None, float | None], dA_cumsum: Tensor,
    ddA_terms: Tensor, cb_diagonal: Tensor, ddA_state: Tensor, ddA_blocks: Tensor | None, chunk: int, d_dt: Tensor,
    param_partials: Tensor,
) -> None:  # fmt: skip
    """Fill d_dt, the gradient of the raw dt (heads contiguous), and param_partials, the gradients of A, D and dt_bias by
    sequence and chunk, [batch, chunks, 3, heads], from the results of the other kernels; all of these are fp32.

    ddA_terms: [batch, heads, chunks, 3, chunk], per head and token, in the notation of intra_chunk_bwd.py:
        earlier_i = sum_{j < i} G_ij L_ij T_ij dt_j + 2^a_i C_i . S dy_i,   later_j = sum_{i > j} G_ij L_ij T_ij,
        same_j = T_jj, in this order
    dA_cumsum: from chunk_cumsum_fwd, but with after_j = 2^(a_end - a_j) x_j . B_j R in place of dt
    cb_diagonal: G_jj, [batch, chunks, groups, chunk]
    ddA_state: 2^a_end S . R, [batch, chunks, parts, heads], to be summed over parts
    ddA_blocks: if there is one, [batch, heads, chunks, blocks, 2, chunk], to be summed over blocks: after_j, which is then not
        in dA_cumsum, and 2^a_i C_i . S dy_i, which is then not in ddA_terms

    All of these may have several heads for each of dt, which are its parts: they are summed.
    """
    batch, seq_len, n_heads = dt.shape
    chunks, head_parts = ddA_terms.shape[2], ddA_terms.shape[1] // n_heads
    assert (
        d_dt.stride(2) == 1 and param_partials.shape == (batch, chunks, 3, n_heads) and param_partials.is_contiguous()
    )
    _chunk_cumsum_bwd[cdiv(n_heads, _HEADS_PER_PROGRAM), chunks, batch](
        *(dt, A, dt_bias, dA_cumsum, ddA_terms, cb_diagonal, ddA_state, ddA_blocks, d_dt, param_partials),
        *(seq_len, n_heads, n_heads // cb_diagonal.shape[2], *dt.stride(), *d_dt.stride()[:2], *dt_limit),
        CHUNK=chunk,
        PARTS=ddA_state.shape[2],
        DSTATE_BLOCKS=1 if ddA_blocks is None else ddA_blocks.shape[3],
        HEAD_PARTS=head_parts,
        HEADS_PER_PROGRAM=_HEADS_PER_PROGRAM,
        num_warps=4,
    )


@jit
def _chunk_cumsum_fwd(
    dt, A, dt_bias, document_ids, dA_cumsum, largest_dt, seq_idx, seq_len, n_heads, dt_row, dt_token, dt_head, dt_min,
    dt_max, CHUNK: tl.constexpr, HEAD_PARTS: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, chunk, row of the batch)."""
    block, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    t, h = chunk * CHUNK + tl.arange(0, CHUNK), block * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    h_valid = h < n_heads
    valid = (t < seq_len)[:, None] & h_valid[None, :]
    of_head = h // HEAD_PARTS
    dt += row * dt_row + t[:, None].to(tl.int64) * dt_token + of_head[None, :] * dt_head
    raw = tl.load(dt, mask=valid, other=0.0)
    bias = tl.load(dt_bias + of_head, mask=h_valid, other=0.0).to(tl.float32)
    step = softplus(raw.to(tl.float32) + bias[None, :])
    if dt_min is not None:
        step = tl.maximum(step, dt_min)
    if dt_max is not None:
        step = tl.minimum(step, dt_max)
    step = tl.where(valid, step, 0.0)
    rate = tl.load(A + of_head, mask=h_valid, other=0.0).to(tl.float32) * 1.4426950408889634  # log2(e)
    padded = tl.num_programs(1) * CHUNK
    dA_cumsum += (((row * n_heads + h) * tl.num_programs(1) + chunk) * (2 * CHUNK))[None, :] + tl.arange(0, CHUNK)[
        :, None
    ]
    tl.store(dA_cumsum, tl.cumsum(step * rate[None, :], 0), mask=h_valid[None, :])
    tl.store(dA_cumsum + CHUNK, step, mask=h_valid[None, :])
    if largest_dt is not None:
        tl.store(largest_dt + (row * n_heads + h) * tl.num_programs(1) + chunk, tl.max(step, 0), mask=h_valid)

    if document_ids is not None and block == 0:
        this, last = load_documents(document_ids, row, t, seq_len)
        tl.store(seq_idx + row * padded + t, tl.cumsum((this != last).to(tl.int32), 0))


@triton.jit
def load_documents(document_ids, row, t, seq_len):
    """Documents of tokens, and of those before. Nothing precedes the first but the initial state, which belongs to its document."""
    inside = (t > 0) & (t < seq_len)
    this = tl.load(document_ids + row * seq_len + t, mask=inside, other=0)
    last = tl.load(document_ids + row * seq_len + t - 1, mask=inside, other=0)
    return this, last


@jit
def _chunk_cumsum_bwd(
    dt, A, dt_bias, dA_cumsum, ddA_terms, cb_diagonal, ddA_state, ddA_blocks, d_dt, param_partials, seq_len, n_heads,
    per_group, dt_row, dt_token, dt_head, d_dt_row, d_dt_token, dt_min, dt_max, CHUNK: tl.constexpr,
    PARTS: tl.constexpr, DSTATE_BLOCKS: tl.constexpr, HEAD_PARTS: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (block of heads, chunk, row of the batch)."""
    block, chunk, row = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(1)
    t, h = chunk * CHUNK + tl.arange(0, CHUNK), block * HEADS_PER_PROGRAM + tl.arange(0, HEADS_PER_PROGRAM)
    h_valid = h < n_heads
    valid = (t < seq_len)[:, None] & h_valid[None, :]

    raw = tl.load(dt + row * dt_row + t[:, None].to(tl.int64) * dt_token + h[None, :] * dt_head, mask=valid, other=0.0)
    shifted = raw.to(tl.float32) + tl.load(dt_bias + h, mask=h_valid, other=0.0).to(tl.float32)[None, :]
    free = softplus(shifted)
    step = free
    passes = valid
    if dt_min is not None:
        step = tl.maximum(step, dt_min)
        passes = passes & (free >= dt_min)
    if dt_max is not None:
        step = tl.minimum(step, dt_max)
        passes = passes & (free <= dt_max)

    q = tl.arange(0, CHUNK)[:, None]
    of_head = (row * n_heads + h) * (HEAD_PARTS * chunks) + chunk  # first of its parts
    earlier, later, same, after = load_terms(
        ddA_terms, dA_cumsum, ddA_blocks, of_head, q, valid, chunks, CHUNK, DSTATE_BLOCKS, HEAD_PARTS
    )
    n_groups = (n_heads + per_group - 1) // per_group
    cb_diagonal += ((row * chunks + chunk) * n_groups + h[None, :] // per_group) * CHUNK + tl.arange(0, CHUNK)[:, None]
    d_step = later + tl.load(cb_diagonal, mask=valid, other=0.0) * same + after
    d_log_decay = log_decay_gradient(
        earlier, later, after, step, ddA_state, h, h_valid, row, chunk, chunks, n_heads, PARTS, HEAD_PARTS
    )

    rate = tl.load(A + h, mask=h_valid, other=0.0).to(tl.float32)
    d_shifted = tl.where(passes, (d_step + d_log_decay * rate[None, :]) * tl.sigmoid(shifted), 0.0)
    to = row * d_dt_row + t[:, None].to(tl.int64) * d_dt_token + h[None, :]
    tl.store(d_dt + to, d_shifted.to(d_dt.dtype.element_ty), mask=valid)
    # Gradients of A, D and the bias.
    param_partials += (row * chunks + chunk) * 3 * n_heads + h
    tl.store(param_partials, tl.sum(tl.where(valid, d_log_decay * step, 0.0), 0), mask=h_valid)
    tl.store(param_partials + n_heads, tl.sum(same, 0), mask=h_valid)
    tl.store(param_partials + 2 * n_heads, tl.sum(d_shifted, 0), mask=h_valid)


@triton.jit
def load_terms(
    ddA_terms, dA_cumsum, ddA_blocks, of_head, q, valid, chunks,
    CHUNK: tl.constexpr, DSTATE_BLOCKS: tl.constexpr, HEAD_PARTS: tl.constexpr,
):  # fmt: skip
    """earlier, later, same and after of chunk_cumsum_bwd, summed over a head's parts. of_head: the first of them, and the chunk."""
    earlier, later, same, after = _terms(ddA_terms, dA_cumsum, ddA_blocks, of_head, q, valid, CHUNK, DSTATE_BLOCKS)
    for _ in range(1, HEAD_PARTS):
        of_head += chunks
        more = _terms(ddA_terms, dA_cumsum, ddA_blocks, of_head, q, valid, CHUNK, DSTATE_BLOCKS)
        earlier, later, same, after = earlier + more[0], later + more[1], same + more[2], after + more[3]
    return earlier, later, same, after


@triton.jit
def log_decay_gradient(
    earlier, later, after, step, ddA_state, h, h_valid, row, chunk, chunks, n_heads,
    PARTS: tl.constexpr, HEAD_PARTS: tl.constexpr,
):  # fmt: skip
    """Gradients of the natural logarithm of tokens' decays, [tokens, heads]."""
    # The log-decay of a token acts on all that passes it: from an earlier token, or the state before the chunk, to
    # this one or a later one; from earlier tokens to the state after the chunk; and from state to state.
    on_end = step * after
    d_log_decay = tl.cumsum(earlier - step * later, 0, reverse=True) + (tl.cumsum(on_end, 0) - on_end)
    for part in range(PARTS):
        at = ddA_state + (((row * chunks + chunk) * PARTS + part) * n_heads + h) * HEAD_PARTS
        for head_part in range(HEAD_PARTS):
            d_log_decay += tl.load(at + head_part, mask=h_valid, other=0.0)[None, :]
    return d_log_decay


@triton.jit
def _terms(
    ddA_terms, dA_cumsum, ddA_blocks, of_head, q, valid, CHUNK: tl.constexpr, DSTATE_BLOCKS: tl.constexpr
):  # fmt: skip
    """earlier, later, same and after of chunk_cumsum_bwd. of_head: head and chunk, counted over all rows."""
    ddA_terms += (of_head * (3 * CHUNK))[None, :] + q
    earlier = tl.load(ddA_terms, mask=valid, other=0.0)
    later = tl.load(ddA_terms + CHUNK, mask=valid, other=0.0)
    same = tl.load(ddA_terms + 2 * CHUNK, mask=valid, other=0.0)
    if DSTATE_BLOCKS == 1:
        after = tl.load(dA_cumsum + (of_head * (2 * CHUNK))[None, :] + q + CHUNK, mask=valid, other=0.0)
    else:
        ddA_blocks += (of_head * (DSTATE_BLOCKS * 2 * CHUNK))[None, :] + q
        after = tl.load(ddA_blocks, mask=valid, other=0.0)
        earlier += tl.load(ddA_blocks + CHUNK, mask=valid, other=0.0)
        for block in range(1, DSTATE_BLOCKS):
            after += tl.load(ddA_blocks + block * (2 * CHUNK), mask=valid, other=0.0)
            earlier += tl.load(ddA_blocks + block * (2 * CHUNK) + CHUNK, mask=valid, other=0.0)
    return earlier, later, same, after


@triton.jit
def softplus(x):
    """log(1 + exp(x)) to fp32's relative accuracy, which log of a sum near 1 would lose: small time steps are usual.

    = max(x, 0) + log1p(e), e = exp(-|x|); log1p(e) = 2 atanh(z), z = e / (2 + e) <= 1/3, by its series up to z^15.
    """
    e = tl.exp(-tl.abs(x))
    z = e / (2.0 + e)
    s = z * z
    series = 1 / 3 + s * (1 / 5 + s * (1 / 7 + s * (1 / 9 + s * (1 / 11 + s * (1 / 13 + s * (1 / 15))))))
    return tl.maximum(x, 0.0) + 2.0 * z * (1.0 + s * series)
