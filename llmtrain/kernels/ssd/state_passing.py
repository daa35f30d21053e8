"""State passing of Mamba-2's scan in Triton: a program loops over the chunks with a tile of one head's state in registers.

In the backward, states (first chunk to last) and their gradients (last to first) are passed in one launch: each direction is
bound by latency, and together they fill more of the device. Both are stored in the dtype of x, or in block-scaled fp16
(block_scaled_fp16.py).
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.ssd.block_scaled_fp16 import ScaledBC, exponent_of
from llmtrain.kernels.ssd.triton_forward import load_tile, padded, tma_descriptor
from llmtrain.kernels.ssd.triton_launch import StatePassingLaunch


class States(NamedTuple):
    """States before each chunk (index 0 of the first dimension), and gradients of the states after each chunk (index 1).

    values: [2, batch, chunks, heads, d_state, head_dim], in the dtype of x; or, if there are exponents, fp16, to be
        multiplied by 2^exponent.
    exponents: [2, batch, chunks, heads, parts] in fp32, one per part of `block_headdim` columns of head_dim.
    added_exponents: [2, batch, tiles, heads, parts] in fp32, those of the tiles of x and dy that are added to the states:
        x or dy divided by 2^exponent is at most 2^14.
    """

    values: Tensor
    exponents: Tensor | None
    added_exponents: Tensor | None
    block_headdim: int


def state_passing_fwd(
    x: Tensor, B: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, initial_state: Tensor | None, chunk: int,
    precision: str, launch: StatePassingLaunch, last_state: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """States before each chunk, [batch, chunks, heads, d_state, head_dim] in the dtype of x.

    x: [batch, T, heads, head_dim]; B: [batch, T, groups, d_state]; dA_cumsum, seq_idx: see chunk_cumsum_fwd;
    initial_state, and last_state (the state after the last token, filled if given): [batch, heads, head_dim, d_state],
    fp32 and contiguous.
    """
    batch, _, n_heads, head_dim = x.shape
    shape = (batch, dA_cumsum.shape[2], n_heads, B.shape[3], head_dim)
    states = States(torch.empty(shape, dtype=x.dtype, device=x.device), None, None, _block_headdim(launch, head_dim))
    ends = (initial_state, None, last_state)
    tile = launch.tile or chunk
    _launch(x, x, ScaledBC(B, B, None), dA_cumsum, None, seq_idx, ends, states, chunk, tile, precision, launch)
    return states.values


def added_state(
    x: Tensor, B: Tensor, dA_cumsum: Tensor, seq_idx: Tensor | None, chunk: int, precision: str, launch: StatePassingLaunch,
    reverse: bool = False,
) -> Tensor:  # fmt: skip
    """The state after the last token from one of zero, [batch, heads, head_dim, d_state] in fp32; with `reverse`, of dy and C in
    place of x and B, the gradient of the state before the first token. States between are not stored. Arguments as of
    state_passing_fwd.
    """
    batch, _, n_heads, head_dim = x.shape
    found = torch.empty((batch, n_heads, head_dim, B.shape[3]), dtype=torch.float32, device=x.device)
    ends = (None, None, found)
    bc, tile = ScaledBC(B, B, None), launch.tile or chunk
    _launch(x, x, bc, dA_cumsum, None, seq_idx, ends, None, chunk, tile, precision, launch, reverse)
    return found


def state_passing_bwd(
    x: Tensor, dy: Tensor, bc: ScaledBC, dA_cumsum: Tensor, largest_dt: Tensor | None, seq_idx: Tensor | None,
    initial_state: Tensor | None, d_final_state: Tensor | None, d_initial_state: Tensor | None, chunk: int, tile: int,
    precision: str, launch: StatePassingLaunch,
) -> States:  # fmt: skip
    """States before each chunk, and gradients of the states after each chunk, which are passed from the last chunk to the
    first with dy and C in place of x and B.

    largest_dt: see chunk_cumsum_fwd; needed for fp16. d_final_state: gradient of the state after the last token;
    d_initial_state: gradient of the initial state, filled if given; both shaped like initial_state of state_passing_fwd.
    tile: tokens that are read at a time, a chunk or a part of one.
    """
    states = empty_states(x, bc, chunk, tile, launch)
    ends = (initial_state, d_final_state, d_initial_state)
    _launch(x, dy, bc, dA_cumsum, largest_dt, seq_idx, ends, states, chunk, tile, precision, launch)
    return states


def empty_states(x: Tensor, bc: ScaledBC, chunk: int, tile: int, launch: StatePassingLaunch) -> States:
    """Memory for the result of state_passing_bwd."""
    batch, seq_len, n_heads, head_dim = x.shape
    chunks, scaled = cdiv(seq_len, chunk), bc.exponents is not None
    shape = (2, batch, chunks, n_heads, bc.B.shape[3], head_dim)
    values = torch.empty(shape, dtype=torch.float16 if scaled else x.dtype, device=x.device)
    exponents, added_exponents = None, None
    if scaled:
        tiles, parts = chunks * (chunk // tile), cdiv(head_dim, _block_headdim(launch, head_dim))
        exponents = torch.empty((2, batch, chunks, n_heads, parts), dtype=torch.float32, device=x.device)
        added_exponents = torch.empty((2, batch, tiles, n_heads, parts), dtype=torch.float32, device=x.device)
    return States(values, exponents, added_exponents, _block_headdim(launch, head_dim))


def _block_headdim(launch: StatePassingLaunch, head_dim: int) -> int:
    return min(launch.block_headdim, padded(head_dim))


def _launch(
    x: Tensor, dy: Tensor, bc: ScaledBC, dA_cumsum: Tensor, largest_dt: Tensor | None, seq_idx: Tensor | None,
    ends: tuple[Tensor | None, ...], states: States | None, chunk: int, tile: int, precision: str,
    launch: StatePassingLaunch, reverse: bool = False,
) -> None:  # fmt: skip
    """Launch the kernel, in both directions if `states` has room for both. states: None: not stored."""
    batch, seq_len, n_heads, head_dim = x.shape
    n_groups, d_state = bc.B.shape[2:]
    bidirectional = states is not None and states.values.ndim == 6
    block_dstate = min(launch.block_dstate, padded(d_state))
    columns, values = _block_headdim(launch, head_dim), None if states is None else states.values
    # Chunks without all their tokens would read those of the next sequence: only masked loads stop at its end.
    wanted = launch.use_tma and seq_len % chunk == 0 and d_state % block_dstate == 0
    views = [tma_descriptor(wanted, t, tile, columns, narrow=True) for t in (x, dy)]
    views += [tma_descriptor(wanted, t, tile, block_dstate) for t in (bc.B, bc.C)]
    if values is not None:
        views.append(tma_descriptor(wanted, values.view(1, -1, 1, head_dim), block_dstate, columns, narrow=True))
    use_tma = all(view is not None for view in views)
    tiles = (*views, None)[:5] if use_tma else (x, dy, bc.B, bc.C, values)
    grid = (launch.tiles(d_state, head_dim), n_heads, batch * (2 if bidirectional else 1))
    _state_passing[grid](
        *(*tiles[:4], bc.exponents, dA_cumsum, largest_dt, seq_idx, *ends),
        *(tiles[4], *((None, None) if states is None else states[1:3])),
        *(seq_len, dA_cumsum.shape[2], *(stride for t in (x, dy, bc.B, bc.C) for stride in t.stride()[:3])),
        HEADS_PER_GROUP=n_heads // n_groups,
        HEAD_DIM=head_dim,
        D_STATE=d_state,
        CHUNK=chunk,
        TILE=tile,
        PADDED_DSTATE=padded(d_state),
        BLOCK_DSTATE=block_dstate,
        BLOCK_HEADDIM=columns,
        BIDIRECTIONAL=bidirectional,
        REVERSE=reverse,
        USE_TMA=use_tma,
        PRECISION=precision,
        NUM_STAGES=launch.num_stages,
        **launch.options,
    )


@jit
def _state_passing(
    x, dy, B, C, bc_exponents, dA_cumsum, largest_dt, seq_idx, initial_state, d_final_state, last_state,
    states, exponents, added_exponents, seq_len, chunks, x_row, x_token, x_head, dy_row, dy_token, dy_head, B_row, B_token, B_group,
    C_row, C_token, C_group,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    PADDED_DSTATE: tl.constexpr, BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
    REVERSE: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (tile of the state, head, direction and row of the batch). The state stays in fp32 registers for all chunks.

    REVERSE: the gradients' direction alone, x and B being dy and C.
    """
    # batch_dir counts rows of the batch in both directions: the first two dimensions of states and exponents.
    head, batch_dir = tl.program_id(1), tl.program_id(2)
    row, reverse = batch_dir, REVERSE
    if BIDIRECTIONAL:
        batch = tl.num_programs(2) // 2
        reverse = batch_dir >= batch
        row = tl.where(reverse, batch_dir - batch, batch_dir)
    if BIDIRECTIONAL and USE_TMA:  # a descriptor cannot be chosen as an address can
        if reverse:
            _pass_states(
                dy, C, bc_exponents, dA_cumsum, largest_dt, seq_idx, initial_state, d_final_state, last_state,
                states, exponents, added_exponents, seq_len, chunks, dy_token, C_token, row, batch_dir, True,
                HEADS_PER_GROUP, HEAD_DIM, D_STATE, CHUNK, TILE, PADDED_DSTATE, BLOCK_DSTATE, BLOCK_HEADDIM, BIDIRECTIONAL,
                REVERSE, USE_TMA, PRECISION, NUM_STAGES,
            )  # fmt: skip
        else:
            _pass_states(
                x, B, bc_exponents, dA_cumsum, largest_dt, seq_idx, initial_state, d_final_state, last_state,
                states, exponents, added_exponents, seq_len, chunks, x_token, B_token, row, batch_dir, False,
                HEADS_PER_GROUP, HEAD_DIM, D_STATE, CHUNK, TILE, PADDED_DSTATE, BLOCK_DSTATE, BLOCK_HEADDIM, BIDIRECTIONAL,
                REVERSE, USE_TMA, PRECISION, NUM_STAGES,
            )  # fmt: skip
    else:
        if BIDIRECTIONAL:
            x, x_row = tl.where(reverse, dy, x), tl.where(reverse, dy_row, x_row)
            x_token, x_head = tl.where(reverse, dy_token, x_token), tl.where(reverse, dy_head, x_head)
            B, B_row = tl.where(reverse, C, B), tl.where(reverse, C_row, B_row)
            B_token, B_group = tl.where(reverse, C_token, B_token), tl.where(reverse, C_group, B_group)
        if not USE_TMA:
            x += row.to(tl.int64) * x_row + head * x_head
            B += row.to(tl.int64) * B_row + head // HEADS_PER_GROUP * B_group
        _pass_states(
            x, B, bc_exponents, dA_cumsum, largest_dt, seq_idx, initial_state, d_final_state, last_state,
            states, exponents, added_exponents, seq_len, chunks, x_token, B_token, row, batch_dir, reverse,
            HEADS_PER_GROUP, HEAD_DIM, D_STATE, CHUNK, TILE, PADDED_DSTATE, BLOCK_DSTATE, BLOCK_HEADDIM, BIDIRECTIONAL,
            REVERSE, USE_TMA, PRECISION, NUM_STAGES,
        )  # fmt: skip


@triton.jit
def _pass_states(
    x, B, bc_exponents, dA_cumsum, largest_dt, seq_idx, initial_state, d_final_state, last_state,
    states, exponents, added_exponents, seq_len, chunks, x_token, B_token, row, batch_dir, reverse,
    HEADS_PER_GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, D_STATE: tl.constexpr, CHUNK: tl.constexpr, TILE: tl.constexpr,
    PADDED_DSTATE: tl.constexpr, BLOCK_DSTATE: tl.constexpr, BLOCK_HEADDIM: tl.constexpr, BIDIRECTIONAL: tl.constexpr,
    REVERSE: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One direction. x, B: those of it; without TMA they point to the program's row and head."""
    PARTS: tl.constexpr = (HEAD_DIM + BLOCK_HEADDIM - 1) // BLOCK_HEADDIM
    part, top = tl.program_id(0) % PARTS, tl.program_id(0) // PARTS * BLOCK_DSTATE
    head, n_heads = tl.program_id(1), tl.num_programs(1)
    group = head // HEADS_PER_GROUP
    n, p, q = top + tl.arange(0, BLOCK_DSTATE), part * BLOCK_HEADDIM + tl.arange(0, BLOCK_HEADDIM), tl.arange(0, TILE)
    valid = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :]
    TILES: tl.constexpr = CHUNK // TILE
    tiles, n_groups = (seq_len + TILE - 1) // TILE, n_heads // HEADS_PER_GROUP
    first_token = row * seq_len
    row = row.to(tl.int64)
    first_state, of_row = batch_dir.to(tl.int64) * chunks * n_heads + head, row * n_heads + head

    dA_cumsum += of_row * chunks * (2 * CHUNK)
    inside = n[:, None] * HEAD_DIM + p[None, :]  # offsets in a stored state, which is transposed
    state_at_ends = of_row * (D_STATE * HEAD_DIM) + p[None, :] * D_STATE
    outside = state_at_ends + n[:, None]

    state = tl.zeros((BLOCK_DSTATE, BLOCK_HEADDIM), tl.float32)
    # No element of the state exceeds `bound` in magnitude, in any tile of its rows. The bound is looser than a maximum but needs
    # no reduction over threads, and fp16 has range enough. The state in registers is divided by 2^state_exponent.
    bound, state_exponent = 0.0, 0.0
    if initial_state is not None:
        state = tl.load(initial_state + outside, mask=valid & (not reverse), other=0.0)
        bound = _largest_abs(initial_state + state_at_ends, p, not reverse, D_STATE, HEAD_DIM, PADDED_DSTATE)
    if d_final_state is not None:
        state += tl.load(d_final_state + outside, mask=valid & reverse, other=0.0)
        bound += _largest_abs(d_final_state + state_at_ends, p, reverse, D_STATE, HEAD_DIM, PADDED_DSTATE)
    for iteration in tl.range(0, chunks * TILES, num_stages=NUM_STAGES):
        tile = iteration
        if BIDIRECTIONAL:
            tile = tl.where(reverse, chunks * TILES - 1 - iteration, iteration)
        elif REVERSE:
            tile = chunks * TILES - 1 - iteration
        chunk, within = tile // TILES, tile % TILES
        if states is not None:  # noqa: SIM102 - known when it is compiled, unlike the next
            if iteration % TILES == 0:
                at = first_state + chunk * n_heads
                stored = state
                if exponents is not None:
                    exponent = exponent_of(bound)
                    stored = state * tl.exp2(state_exponent - exponent)
                    tl.store(exponents + at * PARTS + part, exponent, mask=top == 0)
                if USE_TMA:
                    below = ((batch_dir * chunks + chunk) * n_heads + head) * D_STATE + top
                    states.store([below, part * BLOCK_HEADDIM], stored.to(states.dtype))
                else:
                    to = states + at * (D_STATE * HEAD_DIM) + inside
                    tl.store(to, stored.to(states.dtype.element_ty), mask=valid)

        first = tile * TILE
        if USE_TMA:
            v = x.load([first_token + first, head * HEAD_DIM + part * BLOCK_HEADDIM])
            k = B.load([first_token + first, group * D_STATE + top])
        else:
            v = load_tile(x + first.to(tl.int64) * x_token, q, p, x_token, seq_len - first, HEAD_DIM)
            k = load_tile(B + first.to(tl.int64) * B_token, q, n, B_token, seq_len - first, D_STATE)
        dA_chunk = dA_cumsum + chunk * (2 * CHUNK) + within * TILE
        a, a_end = tl.load(dA_chunk + q), tl.load(dA_chunk + TILE - 1)
        a_begin = tl.load(dA_chunk - 1, mask=within > 0, other=0.0)
        dt = tl.load(dA_chunk + CHUNK + q)
        chunk_decay = tl.exp2(a_end - a_begin)
        # dt may exceed 1, decays do not.
        dt_exponent = 0.0
        if exponents is not None:
            dt_exponent = tl.maximum(tl.ceil(tl.log2(tl.load(largest_dt + of_row * chunks + chunk))), -100.0)
        weight = tl.exp2(a_end - a - dt_exponent) * dt
        if BIDIRECTIONAL:
            weight, dt_exponent = tl.where(reverse, tl.exp2(a - a_begin), weight), tl.where(reverse, 0.0, dt_exponent)
        elif REVERSE:
            weight = tl.exp2(a - a_begin)
        if seq_idx is not None:
            seq_idx_at = seq_idx + row * chunks * CHUNK + first
            seq_idx_t, seq_idx_last = tl.load(seq_idx_at + q), tl.load(seq_idx_at + TILE - 1)
            seq_idx_prev = tl.load(seq_idx_at - 1, mask=within > 0, other=0)
            chunk_decay = tl.where(seq_idx_last == seq_idx_prev, chunk_decay, 0.0)
            weight = tl.where(seq_idx_t == tl.where(reverse, seq_idx_prev, seq_idx_last), weight, 0.0)
        v = v.to(tl.float32)
        if USE_TMA and HEAD_DIM % BLOCK_HEADDIM != 0:
            v = tl.where((p < HEAD_DIM)[None, :], v, 0.0)  # the exponent is the head's own
        if exponents is not None:
            k_exponent = tl.load(
                bc_exponents + (batch_dir * tiles + tile) * n_groups + group, mask=tile < tiles, other=0.0
            )
            v_exponent = exponent_of(tl.max(tl.abs(v)))
            tl.store(
                added_exponents + ((batch_dir * chunks * TILES + tile) * n_heads + head) * PARTS + part,
                v_exponent,
                mask=top == 0,
            )
            # At least so large that a state of this size, divided by the same power, does not overflow, nor the power of a state
            # that is zero.
            least = tl.maximum(exponent_of(bound) - 60.0, -120.0)
            v_exponent = tl.maximum(v_exponent, least - k_exponent - dt_exponent)
            v_fp16, product_exponent = (
                (v * weight[:, None] * tl.exp2(-v_exponent)).to(tl.float16),
                v_exponent + k_exponent + dt_exponent,
            )
            kept = state * (chunk_decay * tl.exp2(state_exponent - product_exponent))
            state, state_exponent = tl.dot(tl.trans(k), v_fp16, acc=kept, input_precision=PRECISION), product_exponent
            bound = bound * chunk_decay + tl.exp2(product_exponent + 28.0) * TILE
        else:
            state = tl.dot(
                tl.trans(k), (v * weight[:, None]).to(k.dtype), acc=state * chunk_decay, input_precision=PRECISION
            )
    if last_state is not None:
        if BIDIRECTIONAL:
            valid = valid & reverse
        tl.store(last_state + outside, state * tl.exp2(state_exponent), mask=valid)


@triton.jit
def _largest_abs(state_at_ends, p, wanted, D_STATE: tl.constexpr, HEAD_DIM: tl.constexpr, PADDED_DSTATE: tl.constexpr):
    n = tl.arange(0, PADDED_DSTATE)
    inside = (n < D_STATE)[:, None] & (p < HEAD_DIM)[None, :] & wanted
    return tl.max(tl.abs(tl.load(state_at_ends + n[:, None], mask=inside, other=0.0)))
