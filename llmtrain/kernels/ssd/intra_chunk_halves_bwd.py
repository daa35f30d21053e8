"""Mamba-2's state-space duality in Triton, backward: gradients over pairs across the two halves of a chunk.

Needed where the kernel of intra_chunk_bwd.py takes half a chunk at a time. In its notation, with j in the first half, i in the
second, and a_mid at the end of the first, the decay is a product of two factors, neither of which can overflow:

    L_ij = 2^(a_mid - a_j) 2^(a_i - a_mid)

So a matrix over pairs takes no exponentials, only a weight per row and per column, and C B^T and the mask of documents are
the same for all heads. Row and column sums come from one fp32 matrix, as there.
"""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import jit
from llmtrain.kernels.ssd.head_blocks import head_blocks, token_stride
from llmtrain.kernels.ssd.triton_forward import load_tile, own_columns, padded, tma_descriptor
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch


def intra_chunk_halves_bwd(
    dy: Tensor, x: Tensor, B: Tensor, C: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, ddA_terms: Tensor,
    dx: Tensor, chunk: int, precision: str, launch: HeadLoopLaunch, num_sms: int,
) -> Tensor:  # fmt: skip
    """Add to dx and to the first two of `ddA_terms`, after intra_chunk_bwd.

    Returns dCB between the halves by blocks of heads, [blocks, batch, chunks, groups, chunk / 2, chunk / 2].
    """
    seq_len, n_heads, head_dim = x.shape[1:]
    n_groups, d_state = B.shape[2:]
    chunks, tile = dA_cumsum.shape[2], chunk // 2
    heads, blocks = head_blocks(x, n_groups, chunks, launch, num_sms)
    dCB_halves = torch.empty((blocks, x.shape[0], chunks, n_groups, tile, tile), dtype=B.dtype, device=x.device)
    strides = tuple(s for t in (dy, x, B, C) for s in t.stride()[:3])
    # A last chunk without a second half would read that of the next sequence: only masked loads stop at its end.
    wanted = launch.use_tma and seq_len % chunk == 0
    views = [tma_descriptor(wanted, t, tile, narrow=True) for t in (dy, x)]
    use_tma = all(view is not None for view in views)
    dy, x = views if use_tma else (dy, x)
    _intra_chunk_halves_bwd[n_groups * blocks, chunks, dA_cumsum.shape[0]](
        *(dy, x, B, C, dA_cumsum, seq_idx, dx, dCB_halves, ddA_terms),
        *(seq_len, *strides),
        HEADS_PER_GROUP=n_heads // n_groups,
        N_HEADS=n_heads,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        TILE=tile,
        BLOCK_DSTATE=padded(d_state),
        BLOCK_HEADDIM=padded(head_dim),
        HEADS_PER_PROGRAM=heads,
        TOKEN_STRIDE=token_stride(dx),
        USE_TMA=use_tma,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )
    return dCB_halves


@jit
def _intra_chunk_halves_bwd(
    dy, x, B, C, dA_cumsum, seq_idx, dx, dCB_halves, ddA_terms,
    seq_len, dy_row, dy_token, dy_head, x_row, x_token, x_head, B_row, B_token, B_group, C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr,
    TILE: tl.constexpr, BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, chunk, row of the batch). Matrices over pairs are [j, i]."""
    BLOCKS: tl.constexpr = (HEADS_PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    N_GROUPS: tl.constexpr = N_HEADS // HEADS_PER_GROUP
    CHUNK: tl.constexpr = 2 * TILE
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    chunk, row = tl.program_id(1), tl.program_id(2).to(tl.int64)
    chunks, batch = tl.num_programs(1), tl.num_programs(2)
    first = chunk * CHUNK
    middle = first + TILE
    q, n, p = tl.arange(0, TILE), tl.arange(0, BLOCK_DSTATE), tl.arange(0, BLOCK_HEADDIM)

    b_at = B + row * B_row + group * B_group + first.to(tl.int64) * B_token
    c_at = C + row * C_row + group * C_group + middle.to(tl.int64) * C_token
    b_tile = load_tile(b_at, q, n, B_token, seq_len - first, D_STATE)
    c_tile = load_tile(c_at, q, n, C_token, seq_len - middle, D_STATE)
    cb = tl.dot(b_tile, tl.trans(c_tile), input_precision=PRECISION)
    if seq_idx is not None:
        seq_idx += row * chunks * CHUNK + first + q
        pair_mask = tl.load(seq_idx)[:, None] == tl.load(seq_idx + TILE)[None, :]
        cb = tl.where(pair_mask, cb, 0.0)

    if not USE_TMA:
        x += row * x_row + first.to(tl.int64) * x_token
        dy += row * dy_row + middle.to(tl.int64) * dy_token
    dx += (row * seq_len + first) * TOKEN_STRIDE
    dA_cumsum += (row * N_HEADS * chunks + chunk) * (2 * CHUNK)
    ddA_terms += (row * N_HEADS * chunks + chunk) * (3 * CHUNK)
    inside = (first + q < seq_len)[:, None] & (p < HEAD_DIM)[None, :]
    dcb = tl.zeros((TILE, TILE), tl.float32)
    begin = group * HEADS_PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * HEADS_PER_GROUP)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        if USE_TMA:
            token = tl.program_id(2) * seq_len + first
            x_tile = x.load([token, head * HEAD_DIM])
            dy_tile = dy.load([token + TILE, head * HEAD_DIM])
            if HEAD_DIM < BLOCK_HEADDIM:
                x_tile = own_columns(x_tile, p, HEAD_DIM)
        else:
            x_tile = load_tile(x + head * x_head, q, p, x_token, seq_len - first, HEAD_DIM)
            dy_tile = load_tile(dy + head * dy_head, q, p, dy_token, seq_len - middle, HEAD_DIM)
        of_head = dA_cumsum + head * chunks * (2 * CHUNK)
        a, dt = tl.load(of_head + q), tl.load(of_head + CHUNK + q)
        a_mid = tl.load(of_head + TILE - 1)
        to_mid, from_mid = tl.exp2(a_mid - a), tl.exp2(tl.load(of_head + TILE + q) - a_mid)
        weight = to_mid * dt

        # Factors of j alone are applied after the product.
        u = tl.dot((cb * from_mid[None, :]).to(dy_tile.dtype), dy_tile, input_precision=PRECISION) * weight[:, None]
        to = dx + head * HEAD_DIM + q[:, None] * TOKEN_STRIDE + p[None, :]
        d_x = tl.load(to, mask=inside, other=0.0).to(tl.float32) + u
        tl.store(to, d_x.to(dx.dtype.element_ty), mask=inside)
        d_pair = tl.dot(x_tile, tl.trans(dy_tile), input_precision=PRECISION) * from_mid[None, :]
        dcb += d_pair * weight[:, None]
        d_pair *= cb
        later, earlier = (
            ddA_terms + head * chunks * (3 * CHUNK) + CHUNK + q,
            ddA_terms + head * chunks * (3 * CHUNK) + TILE + q,
        )
        tl.store(later, tl.load(later) + tl.sum(d_pair, 1) * to_mid)
        tl.store(earlier, tl.load(earlier) + tl.sum(d_pair * weight[:, None], 0))

    if seq_idx is not None:
        dcb = tl.where(tl.load(seq_idx)[:, None] == tl.load(seq_idx + TILE)[None, :], dcb, 0.0)
    of_block = ((block * batch + row) * chunks + chunk) * N_GROUPS + group
    to = dCB_halves + of_block * (TILE * TILE) + q[:, None] * TILE + q[None, :]
    tl.store(to, dcb.to(dCB_halves.dtype.element_ty))
