"""Mamba-2's state-space duality in Triton, forward.

Two forms. The sequential chunk scan: one program per head loops over the chunks with the state in registers, which moves the
fewest bytes. Or, where heads are too few to fill the device, state passing (state_passing.py), then all chunks in parallel.

Chunked form of arXiv:2405.21060, section 6. With a the running sum of log2(decay) within a chunk, S the state before
the chunk, stored transposed, [d_state, head_dim]:

    S' = 2^a_end S + sum_j (dt_j 2^(a_end - a_j)) B_j x_j^T
    y_i = 2^a_i C_i S + sum_{j <= i} (C_i . B_j) 2^(a_i - a_j) dt_j x_j + D x_i

No exponent is positive, so nothing overflows. A document that begins at t drops the state before t: terms between tokens of
different seq_idx are masked.

D is [heads], or [batch, heads, T]: a factor of each token, in which its own score is contained; then only j < i are summed.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import Descriptor, cdiv, jit, next_power_of_2
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch, SequentialScanLaunch


def padded(size: int) -> int:
    """The next power of two, at least 16: a size that matrix instructions take."""
    return max(16, next_power_of_2(size))


def tma_descriptor(
    wanted: bool, t: Tensor, rows: int, columns: int | None = None, narrow: bool = False
) -> Descriptor | None:  # fmt: skip
    """A tensor descriptor of t, [batch, T, heads, width], as [batch * T, heads * width] in blocks of `rows` by `columns`.

    With it Hopper's TMA loads tiles, and no thread computes addresses. None where it is not wanted or not possible: heads and
    sequences must follow each other without gaps, aligned to 16 bytes, in whole blocks of powers of two.

    narrow: heads may also be narrower than a block, to be read alone: what is loaded beyond a head's columns is then the next
    head's, or zeros where there is none.
    """
    batch, seq_len, heads, width = t.shape
    row, token, head, element = t.stride()
    aligned = token * t.element_size() % 16 == 0 and t.data_ptr() % 16 == 0
    dense = element == 1 and (head == width or heads == 1) and (row == seq_len * token or batch == 1)
    whole = width == padded(width) or (narrow and width * t.element_size() % 16 == 0)
    if not (wanted and aligned and dense and whole and seq_len % rows == 0):
        return None
    return Descriptor(t, [batch * seq_len, heads * width], [token, 1], [rows, columns or padded(width)])


def skip_options(D: Tensor, n_heads: int) -> dict[str, int | bool]:
    """Constants of a kernel that reads D, [heads of the model] or [batch, heads of the model, T]. n_heads: of the scan."""
    return {"HEAD_PARTS": n_heads // D.shape[-1 if D.ndim == 1 else 1], "TOKEN_SKIP": D.ndim == 3}


def sequential_chunk_scan(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None,
    initial_state: Tensor | None, chunk: int, precision: str, launch: SequentialScanLaunch,
    final_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """y, like x but contiguous. Fills `final_state` if given; it and initial_state are as in state_passing_fwd.

    Reads x once, and B and C once per head (mostly from the L2 cache); writes y.
    """
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = B.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    columns = min(launch.block_headdim, padded(head_dim))
    strides = (*x.stride()[:3], *B.stride()[:3], *C.stride()[:3])
    wanted = launch.use_tma
    tiles: list[Any] = [tma_descriptor(wanted, x, chunk, columns, narrow=True)]
    tiles += [tma_descriptor(wanted, t, chunk) for t in (B, C)]
    tiles.append(y if head_dim % columns else tma_descriptor(wanted, y, chunk, columns))
    use_tma = all(tile is not None for tile in tiles)
    x_tile, b_tile, c_tile, out = tiles if use_tma else (x, B, C, y)
    _sequential_chunk_scan[cdiv(head_dim, columns), n_heads, batch](
        *(x_tile, b_tile, c_tile, D, dA_cumsum, seq_idx, initial_state, out, final_state),
        *(seq_len, dA_cumsum.shape[2], *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        **skip_options(D, n_heads),
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        BLOCK_DSTATE=padded(d_state),
        BLOCK_HEADDIM=columns,
        USE_TMA=use_tma,
        STATE_FIRST=launch.state_first and seq_idx is None,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )
    return y


def chunk_scan(
    x: Tensor, B: Tensor, C: Tensor, D: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, states: Tensor, chunk: int,
    precision: str, launch: HeadLoopLaunch, num_sms: int,
) -> Tensor:  # fmt: skip
    """y, like x but contiguous, from the states before each chunk, which state_passing_fwd returns."""
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = C.shape[2:]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    per_group = n_heads // n_groups
    heads = launch.heads(per_group, batch * dA_cumsum.shape[2] * n_groups, num_sms)
    strides = tuple(s for t in (x, B, C) for s in t.stride()[:3])
    wanted = launch.use_tma and d_state == padded(d_state)
    tiles: list[Any] = [tma_descriptor(wanted, x, chunk, narrow=True)]
    tiles.append(tma_descriptor(wanted, states.view(1, -1, 1, head_dim), d_state, narrow=True))
    tiles.append(y if head_dim % padded(head_dim) else tma_descriptor(wanted, y, chunk))
    use_tma = all(tile is not None for tile in tiles)
    x, states, out = tiles if use_tma else (x, states, y)
    _chunk_scan[n_groups * cdiv(per_group, heads), dA_cumsum.shape[2], batch](
        *(x, B, C, D, dA_cumsum, seq_idx, states, out),
        *(seq_len, *strides),
        HEADS_PER_GROUP=per_group,
        **skip_options(D, n_heads),
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        BLOCK_DSTATE=padded(d_state),
        BLOCK_HEADDIM=padded(head_dim),
        HEADS_PER_PROGRAM=heads,
        USE_TMA=use_tma,
        KEEP_CB=launch.keep_cb,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )
    return y


@triton.jit
def load_tile(base, t, column, row_stride, n_rows, WIDTH: tl.constexpr):
    """A tile of a matrix whose last dim is contiguous; zeros beyond its rows and its width."""
    at = t[:, None] * row_stride + column[None, :]
    return tl.load(base + at, mask=(t < n_rows)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def own_columns(tile, p, HEAD_DIM: tl.constexpr):
    """A tile without what a `narrow` descriptor loads of the next head: where columns are summed, that would count."""
    return tl.where((p < HEAD_DIM)[None, :], tile, 0.0).to(tile.dtype)


@triton.jit
def load_skip(D, row, head, n_heads, t, seq_len, HEAD_PARTS: tl.constexpr, TOKEN_SKIP: tl.constexpr):
    """D of a head, or of its tokens t, [tokens, 1]; see skip_options."""
    if TOKEN_SKIP:
        D += (row * n_heads + head) // HEAD_PARTS * seq_len
        skip = tl.load(D + t, mask=t < seq_len, other=0.0)[:, None]
    else:
        skip = tl.load(D + head // HEAD_PARTS).to(tl.float32)
    return skip


@triton.jit
def up_to(i, j, TOKEN_SKIP: tl.constexpr):
    """Pairs whose score is summed: j <= i, or j < i."""
    if TOKEN_SKIP:
        pairs = i > j
    else:
        pairs = i >= j
    return pairs


@triton.jit
def opaque_zero(value):
    """0, computed so that the compiler cannot prove it: a comparison with it is not loop-invariant.

    Otherwise masks over pairs, [CHUNK, CHUNK], would be kept over the whole loop, in 32 registers or more.
    """
    return (value > 1e30).to(tl.int32)


@triton.jit
def _scores(c_tile, b_tile, a, dt, pair_mask, PRECISION: tl.constexpr):
    """Weight of each token j <= i in the output at i: C B^T, decayed, times dt_j."""
    scores = tl.dot(c_tile, tl.trans(b_tile), input_precision=PRECISION)
    scores *= tl.exp2(a[:, None] - a[None, :]) * dt[None, :]  # overflows only where it is masked
    return tl.where(pair_mask, scores, 0.0)


@jit
def _sequential_chunk_scan(
    x, B, C, D, dA_cumsum, seq_idx, initial_state, y, final_state,
    seq_len, chunks, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_PARTS: tl.constexpr, TOKEN_SKIP: tl.constexpr, HEAD_DIM: tl.constexpr,
    D_STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, USE_TMA: tl.constexpr,
    STATE_FIRST: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of a head's columns, head, row of the batch): loops over the chunks."""
    head, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    n_heads = tl.num_programs(1)
    group = head // HEADS_PER_GROUP
    q, n = tl.arange(0, CHUNK), tl.arange(0, BLOCK_DSTATE)
    left = tl.program_id(0) * BLOCK_HEADDIM
    p = left + tl.arange(0, BLOCK_HEADDIM)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]

    STORE_TMA: tl.constexpr = USE_TMA and HEAD_DIM % BLOCK_HEADDIM == 0
    if not USE_TMA:
        x += row * x_row + head * x_head
        B += row * B_row + group * B_group
        C += row * C_row + group * C_group
    if not STORE_TMA:
        y += (row * seq_len * n_heads + head) * HEAD_DIM
    dA_cumsum += (row * n_heads + head) * chunks * (2 * CHUNK)
    if not TOKEN_SKIP:
        skip = load_skip(D, row, head, n_heads, q, seq_len, HEAD_PARTS, TOKEN_SKIP)
    outside = (row * n_heads + head) * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE + n[:, None]

    state = tl.zeros((BLOCK_DSTATE, BLOCK_HEADDIM), tl.float32)
    if initial_state is not None:
        state = tl.load(initial_state + outside, mask=valid, other=0.0)
    for chunk in tl.range(0, chunks, num_stages=NUM_STAGES):
        first = chunk * CHUNK
        if USE_TMA:
            at = tl.program_id(2) * seq_len + first
            x_tile = x.load([at, head * HEAD_DIM + left])
            b_tile = B.load([at, group * D_STATE])
            c_tile = C.load([at, group * D_STATE])
        else:
            x_tile = load_tile(x + first.to(tl.int64) * x_token, q, p, x_token, seq_len - first, HEAD_DIM)
            b_tile = load_tile(B + first.to(tl.int64) * B_token, q, n, B_token, seq_len - first, D_STATE)
            c_tile = load_tile(C + first.to(tl.int64) * C_token, q, n, C_token, seq_len - first, D_STATE)
        a, dt = tl.load(dA_cumsum + 2 * first + q), tl.load(dA_cumsum + 2 * first + CHUNK + q)
        a_end = tl.load(dA_cumsum + 2 * first + CHUNK - 1)
        chunk_decay, from_start, to_end = tl.exp2(a_end), tl.exp2(a), tl.exp2(a_end - a)
        pair_mask = up_to(q[:, None], q[None, :] + opaque_zero(a_end), TOKEN_SKIP)
        if TOKEN_SKIP:
            skip = load_skip(D, row, head, n_heads, first + q, seq_len, HEAD_PARTS, TOKEN_SKIP)
        if seq_idx is not None:
            seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + q)
            seq_idx_last = tl.load(seq_idx + row * chunks * CHUNK + first + CHUNK - 1)
            chunk_decay = tl.where(seq_idx_last == 0, chunk_decay, 0.0)
            from_start = tl.where(seq_idx_t == 0, from_start, 0.0)
            to_end = tl.where(seq_idx_t == seq_idx_last, to_end, 0.0)
            pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
        if STATE_FIRST:
            out = tl.dot(c_tile, state.to(x_tile.dtype), input_precision=PRECISION) * from_start[:, None]
            out += skip * x_tile.to(tl.float32)
            scores = _scores(c_tile, b_tile, a, dt, pair_mask, PRECISION).to(x_tile.dtype)
            out = tl.dot(scores, x_tile, acc=out, input_precision=PRECISION)
        else:
            scores = _scores(c_tile, b_tile, a, dt, pair_mask, PRECISION).to(x_tile.dtype)
            out = tl.dot(c_tile, state.to(x_tile.dtype), input_precision=PRECISION) * from_start[:, None]
            out = tl.dot(scores, x_tile, acc=out, input_precision=PRECISION)
            out += skip * x_tile.to(tl.float32)
        if STORE_TMA:
            y.store([at, head * HEAD_DIM + left], out.to(y.dtype))
        else:
            to = (
                y + q[:, None] * (n_heads * HEAD_DIM) + p[None, :]
            )  # y advances: offsets from the first token spill registers
            tl.store(to, out.to(y.dtype.element_ty), mask=(first + q < seq_len)[:, None] & (p < HEAD_DIM)[None, :])
            y += CHUNK * n_heads * HEAD_DIM
        weighted = (x_tile.to(tl.float32) * (to_end * dt)[:, None]).to(x_tile.dtype)
        state = tl.dot(tl.trans(b_tile), weighted, acc=state * chunk_decay, input_precision=PRECISION)
    if final_state is not None:
        tl.store(final_state + outside, state, mask=valid)


@jit
def _chunk_scan(
    x, B, C, D, dA_cumsum, seq_idx, states, y,
    seq_len, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_PARTS: tl.constexpr, TOKEN_SKIP: tl.constexpr, N_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, BLOCK_DSTATE: tl.constexpr,
    BLOCK_HEADDIM: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, USE_TMA: tl.constexpr, KEEP_CB: tl.constexpr,
    PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, chunk, row of the batch): loops over the heads."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks = tl.num_programs(1)
    first = chunk * CHUNK
    q, n, p = tl.arange(0, CHUNK), tl.arange(0, BLOCK_DSTATE), tl.arange(0, BLOCK_HEADDIM)

    STORE_TMA: tl.constexpr = USE_TMA and HEAD_DIM == BLOCK_HEADDIM
    if not USE_TMA:
        x += row * x_row + first.to(tl.int64) * x_token
        states += (row * chunks + chunk) * (N_HEADS * D_STATE * HEAD_DIM)
    if not STORE_TMA:
        y += (row * seq_len + first) * (N_HEADS * HEAD_DIM)
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    tokens = seq_len
    seq_len -= first  # tokens from here on

    b_tile = load_tile(
        B + row * B_row + group * B_group + first.to(tl.int64) * B_token, q, n, B_token, seq_len, D_STATE
    )
    c_tile = load_tile(
        C + row * C_row + group * C_group + first.to(tl.int64) * C_token, q, n, C_token, seq_len, D_STATE
    )
    seq_idx_t = None
    if seq_idx is not None:
        seq_idx_t = tl.load(seq_idx + row * chunks * CHUNK + first + q)

    if KEEP_CB:
        pair_mask = up_to(q[:, None], q[None, :], TOKEN_SKIP)
        if seq_idx is not None:
            pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
        cb = tl.where(pair_mask, tl.dot(c_tile, tl.trans(b_tile), input_precision=PRECISION), 0.0)
    begin = group * HEADS_PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_head = head * chunks * (2 * CHUNK)
        if USE_TMA:
            token = tl.program_id(2) * tokens + first
            x_tile = x.load([token, head * HEAD_DIM])
            state = states.load([((tl.program_id(2) * chunks + chunk) * N_HEADS + head) * D_STATE, 0])
        else:
            x_tile = load_tile(x + head * x_head, q, p, x_token, seq_len, HEAD_DIM)
            state = load_tile(states + head * (D_STATE * HEAD_DIM), n, p, HEAD_DIM, D_STATE, HEAD_DIM)
        a, dt = tl.load(dA_cumsum + of_head + q), tl.load(dA_cumsum + of_head + CHUNK + q)
        from_start = tl.exp2(a)
        if seq_idx is not None:
            from_start = tl.where(seq_idx_t == 0, from_start, 0.0)
        # C B^T is computed again for every head where registers are short; loaded from memory it would cost time.
        if KEEP_CB:
            scores = (cb * (tl.exp2(tl.minimum(a[:, None] - a[None, :], 0.0)) * dt[None, :])).to(x_tile.dtype)
        else:
            pair_mask = up_to(q[:, None], q[None, :] + opaque_zero(tl.load(dA_cumsum + of_head)), TOKEN_SKIP)
            if seq_idx is not None:
                pair_mask = pair_mask & (seq_idx_t[:, None] == seq_idx_t[None, :])
            scores = _scores(c_tile, b_tile, a, dt, pair_mask, PRECISION).to(x_tile.dtype)
        out = tl.dot(c_tile, state, input_precision=PRECISION) * from_start[:, None]
        out = tl.dot(scores, x_tile, acc=out, input_precision=PRECISION)
        skip = load_skip(D, row, head, N_HEADS, first + q, tokens, HEAD_PARTS, TOKEN_SKIP)
        out += skip * x_tile.to(tl.float32)
        if STORE_TMA:
            y.store([token, head * HEAD_DIM], out.to(y.dtype))
        else:
            to = q[:, None] * (N_HEADS * HEAD_DIM) + head * HEAD_DIM + p[None, :]
            tl.store(y + to, out.to(y.dtype.element_ty), mask=(q < seq_len)[:, None] & (p < HEAD_DIM)[None, :])
