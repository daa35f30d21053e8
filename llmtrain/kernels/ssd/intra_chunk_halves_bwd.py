"""Mamba-2's state-space duality in Triton, backward: what passes from the first half of a chunk to its second half.

Where the kernels of triton_pairs.py take half a chunk at a time. In their terms, with j in the first half, i in the
second, and a_mid at the end of the first, decays fall apart into two factors, neither of which can overflow:

    L_ij = 2^(a_mid - a_j) 2^(a_i - a_mid)

So a matrix over pairs takes no exponentials, only a weight per row and per column, and C B^T and the mask of documents are
the same for all heads. Row and column sums come from one fp32 matrix, as there.
"""

# What Triton makes of a kernel has other types than the function that pyright reads.
# pyright: reportArgumentType=false, reportCallIssue=false, reportGeneralTypeIssues=false, reportReturnType=false
# pyright: reportIndexIssue=false, reportAssignmentType=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.ssd.head_blocks import blocks_of_heads, token_stride
from llmtrain.kernels.ssd.triton_forward import padded, rows_described, rows_of
from llmtrain.kernels.ssd.triton_launch import HeadsLaunch


def through_halves(
    dy: Tensor,
    x: Tensor,
    B: Tensor,
    C: Tensor,
    times: Tensor,
    begun: Tensor | None,
    vectors: Tensor,
    dx: Tensor,
    chunk: int,
    precision: str,
    launch: HeadsLaunch,
    processors: int,
) -> Tensor:
    """Adds to dx and to the first two of `vectors`, after through_pairs.

    Returns the gradients of the pairs by blocks of heads, [blocks, batch, chunks, groups, chunk / 2, chunk / 2].
    """
    seq_len, n_heads, head_dim = x.shape[1:]
    n_groups, d_state = B.shape[2:]
    chunks, tile = times.shape[2], chunk // 2
    heads, blocks = blocks_of_heads(x, n_groups, chunks, launch, processors)
    d_across = torch.empty((blocks, x.shape[0], chunks, n_groups, tile, tile), dtype=B.dtype, device=x.device)
    strides = tuple(s for t in (dy, x, B, C) for s in t.stride()[:3])
    # A last chunk without a second half would take that of the next sequence: only loads through a mask know its end.
    wanted = launch.described and seq_len % chunk == 0
    views = [rows_described(wanted, t, tile) for t in (dy, x)]
    fetched = all(view is not None for view in views)
    dy, x = views if fetched else (dy, x)
    _through_halves[n_groups * blocks, chunks, times.shape[0]](
        *(dy, x, B, C, times, begun, dx, d_across, vectors),
        *(seq_len, *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        TILE=tile,
        ROWS=padded(d_state),
        COLUMNS=padded(head_dim),
        HEADS=heads,
        TOKEN=token_stride(dx),
        DESCRIBED=fetched,
        PRECISION=precision,
        STAGES=launch.stages,
        **launch.options,
    )
    return d_across


@triton.jit
def _through_halves(
    dy, x, B, C, times, begun, dx, d_across, vectors,
    seq_len, dy_row, dy_token, dy_head, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, HEADS: tl.constexpr,
    TOKEN: tl.constexpr, DESCRIBED: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, chunk, row of the batch). Matrices over pairs are [j, i]."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS - 1) // HEADS
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    CHUNK: tl.constexpr = 2 * TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, batch = tl.num_programs(1), tl.num_programs(2)
    first = chunk * CHUNK
    middle = first + TILE
    q, n, p = tl.arange(0, TILE), tl.arange(0, ROWS), tl.arange(0, COLUMNS)

    b_at = B + row * B_row + group * B_group + first.to(tl.int64) * B_token
    c_at = C + row * C_row + group * C_group + middle.to(tl.int64) * C_token
    b = rows_of(b_at, q, n, B_token, seq_len - first, D_STATE)
    c = rows_of(c_at, q, n, C_token, seq_len - middle, D_STATE)
    bc = tl.dot(b, tl.trans(c), input_precision=PRECISION)
    if begun is not None:
        begun += row * chunks * CHUNK + first + q
        paired = tl.load(begun)[:, None] == tl.load(begun + TILE)[None, :]
        bc = tl.where(paired, bc, 0.0)

    if not DESCRIBED:
        x += row * x_row + first.to(tl.int64) * x_token
        dy += row * dy_row + middle.to(tl.int64) * dy_token
    dx += (row * seq_len + first) * TOKEN
    times += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    vectors += (row * N_HEADS * chunks + chunk) * (3 * CHUNK)
    inside = (first + q < seq_len)[:, None] & (p < HEAD_DIM)[None, :]
    d_bc = tl.zeros((TILE, TILE), tl.float32)
    begin = group * HEADS_PER_GROUP + block * HEADS
    end = tl.minimum(begin + HEADS, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=STAGES):
        if DESCRIBED:
            token = tl.program_id(2) * seq_len + first
            x_in = x.load([token, head * HEAD_DIM])
            dy_in = dy.load([token + TILE, head * HEAD_DIM])
        else:
            x_in = rows_of(x + head * x_head, q, p, x_token, seq_len - first, HEAD_DIM)
            dy_in = rows_of(dy + head * dy_head, q, p, dy_token, seq_len - middle, HEAD_DIM)
        of_head = times + head * chunks * (2 * CHUNK)
        a, step = tl.load(of_head + q), tl.load(of_head + CHUNK + q)
        a_mid = tl.load(of_head + TILE - 1)
        to_mid, from_mid = tl.exp2(a_mid - a), tl.exp2(tl.load(of_head + TILE + q) - a_mid)
        weight = to_mid * step

        # What depends on j alone comes after the product.
        u = tl.dot((bc * from_mid[None, :]).to(dy_in.dtype), dy_in, input_precision=PRECISION) * weight[:, None]
        to = dx + head * HEAD_DIM + q[:, None] * TOKEN + p[None, :]
        d_x = tl.load(to, mask=inside, other=0.0).to(tl.float32) + u
        tl.store(to, d_x.to(dx.dtype.element_ty), mask=inside)
        d_pair = tl.dot(x_in, tl.trans(dy_in), input_precision=PRECISION) * from_mid[None, :]
        d_bc += d_pair * weight[:, None]
        d_pair *= bc
        later, earlier = (
            vectors + head * chunks * (3 * CHUNK) + CHUNK + q,
            vectors + head * chunks * (3 * CHUNK) + TILE + q,
        )
        tl.store(later, tl.load(later) + tl.sum(d_pair, 1) * to_mid)
        tl.store(earlier, tl.load(earlier) + tl.sum(d_pair * weight[:, None], 0))

    if begun is not None:
        d_bc = tl.where(tl.load(begun)[:, None] == tl.load(begun + TILE)[None, :], d_bc, 0.0)
    of_block = ((block * batch + row) * chunks + chunk) * N_GROUPS + group
    to = d_across + of_block * (TILE * TILE) + q[:, None] * TILE + q[None, :]
    tl.store(to, d_bc.to(d_across.dtype.element_ty))
