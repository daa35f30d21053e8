"""Gradients through Mamba-3's rotations: of queries, keys, biases, time steps and rates."""

import torch
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit
from llmtrain.kernels.mamba3.rotations import (
    angles_of,
    constants,
    cos_sin,
    join,
    load_bias,
    load_biased_pairs,
    load_pairs,
    load_rates,
    load_rest,
    place,
)
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.ssd.chunk_cumsum import load_documents
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

_LAUNCH = HeadLoopLaunch(programs_per_sm=8, num_stages=1)


def rotate_bwd(
    dq: Tensor, dk: Tensor, d_angles: Tensor, d_weight: Tensor, d_skip: Tensor, d_angle: Tensor | None,
    d_last_k: Tensor | None, score: Tensor, q: Tensor, k: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor,
    k_bias: Tensor, D: Tensor, first: Tensor | None, sums: Tensor, document_ids: Tensor | None, num_sms: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, dt, later, rate, q_bias, k_bias, D and first, from those of `rotate`'s results, with the angles'
    through rotated q and k (keys_bwd), and of the tokens' weights (decays_bwd). d_angle, d_last_k: of the last token, if they
    are wanted; score: of `rotate`."""
    (batch, seq_len, groups, d_state), heads = q.shape, dt.shape[2]
    tiles, angles = sums.shape[3], rate.shape[2]
    of_program = _LAUNCH.heads(heads // groups, batch * tiles * groups, num_sms)
    blocks = cdiv(heads // groups, of_program)
    wide = {"dtype": torch.float32, "device": q.device}
    of_blocks = {"dtype": q.dtype if blocks == 1 else torch.float32, "device": q.device}
    found = [torch.empty((blocks, *q.shape), **of_blocks) for _ in range(2)]
    d_rates = torch.empty((groups * blocks, *rate.shape), **wide)
    d_dt, d_later, d_rate = torch.empty_like(dt), torch.empty_like(later), torch.empty_like(rate)
    # Of a tile, sums of its angles' gradients; of its heads, those of the biases and of D.
    d_rotations = torch.empty((batch, heads, angles, tiles), **wide)
    partials = torch.empty((batch * tiles, heads * (2 * d_state + 1)), **wide)
    sizes, grid = constants(q, rate, heads), (groups * blocks, tiles, batch)
    rest, pairs, places = sizes.pop("REST"), sizes.pop("PAIRS"), (seq_len, *q.stride()[:3], *k.stride()[:3])
    launch = {"HEADS_PER_PROGRAM": of_program, "NUM_STAGES": _LAUNCH.num_stages, **_LAUNCH.options}
    _rotate_bwd[grid](
        *(
            dq,
            dk,
            d_angles,
            d_weight,
            d_skip,
            score,
            d_last_k,
            q,
            k,
            dt,
            later,
            rate,
            q_bias,
            k_bias,
            first,
            sums,
            document_ids,
        ),
        *(*found, d_dt, d_later, d_rates, d_rotations, partials, *places),
        PAIRS=pairs,
        **sizes,
        **launch,
    )
    if rest:
        _rest_bwd[grid](
            *(dq, dk, d_skip, d_last_k, q, k, dt, later, q_bias, k_bias, *found, partials, *places),
            REST=rest,
            **sizes,
            **launch,
        )
    d_rotations = d_rotations.cumsum(3, dtype=torch.float64)
    _rotate_ends[tiles, batch](
        rate, dt, d_rotations, d_angle, d_rates, d_dt, d_rate, seq_len, groups * blocks, batch * seq_len * angles,
        N_HEADS=heads, ANGLES=angles, PAIRS=pairs, TILE=sizes["TILE"], num_warps=4,
    )  # fmt: skip
    d_biases = [torch.empty_like(t) for t in (q_bias, k_bias, D)]
    reduce_partials(partials, *d_biases)
    d_q, d_k = (t[0] if blocks == 1 else t.sum(0).to(q.dtype) for t in found)
    d_first = dt.new_empty(0)
    if first is not None:
        d_first = d_rotations[..., -1].float() if d_angle is None else d_rotations[..., -1].float() + d_angle
    return d_q, d_k, d_dt, d_later, d_rate, *d_biases, d_first


@jit
def _rotate_bwd(
    dq, dk, d_angles, d_weight, d_skip, score, d_last_k, q, k, dt, later, rate, q_bias, k_bias, first, sums, document_ids,
    dq_blocks, dk_blocks, d_dt, d_later, d_rates, d_rotations, partials,
    seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch): loops over heads, and sums over them.

    The gradient of an angle is a db - b da of each pair (a, b) of q and of k, rotated or not, and their gradients. It acts on
    the time steps of all tokens up to this one: within the tile here, of tiles before it by `d_rotations`.
    """
    group, block, begin, end, row, top, first_token, tokens = place(seq_len, N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    t = tl.arange(0, TILE)
    tile, tiles, batch, i = tl.program_id(1), tl.num_programs(1), tl.num_programs(2), tl.arange(0, PAIRS)
    c = tl.arange(0, 2 * PAIRS)
    there, last = (t < tokens)[:, None], (top + t == seq_len - 1)[:, None]
    paired = there & (c < 2 * ANGLES)[None, :]
    q += row * q_row + top * q_token + group * q_group
    k += row * k_row + top * k_token + group * k_group
    zero = tl.zeros((TILE, PAIRS), tl.float32)
    dq_a, dq_b, dk_a, dk_b, d_rate = zero, zero, zero, zero, zero
    partials += (row * tiles + tile) * (N_HEADS * (2 * D_STATE + 1))
    followed = (top + t > 0) & (t < tokens)
    if document_ids is not None:
        this, before = load_documents(document_ids, row, top + t, seq_len)
        followed = followed & (this == before)
    dt += first_token * N_HEADS
    later += first_token * N_HEADS
    score += first_token * N_HEADS
    d_skip += first_token * N_HEADS
    d_weight += first_token * N_HEADS
    d_dt += first_token * N_HEADS
    d_later += first_token * N_HEADS
    dq += first_token * (N_HEADS * D_STATE)
    dk += first_token * (N_HEADS * D_STATE)
    d_angles += first_token * (N_HEADS * ANGLES)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_token, of_head = t * N_HEADS + head, row * N_HEADS + head
        at = of_token * D_STATE
        up_a, up_b = load_pairs(dq, at, i, 1, paired, PAIRS)
        up_e, up_f = load_pairs(dk, at, i, 1, paired, PAIRS)
        turning = there & (i < ANGLES)[None, :]
        d_now = tl.load(d_angles + of_token[:, None] * ANGLES + i[None, :], mask=turning, other=0.0)
        step = tl.load(dt + of_token, mask=t < tokens, other=0.0)
        share = tl.load(later + of_token, mask=t < tokens, other=0.0)
        d_factor = tl.load(d_skip + of_token, mask=t < tokens, other=0.0)
        # What angles take is done with before q and k are loaded and turned: registers do not hold both.
        rates = load_rates(rate + first_token * ANGLES, 0, t, i, tokens, ANGLES)
        if d_last_k is not None:  # noqa: SIM102 (only this one is known when it is compiled)
            if tile == tiles - 1:  # of its last token alone, one number a thread
                now = angles_of(rates, step, first, sums, of_head, i, tile, tiles, ANGLES)
                cos, sin = cos_sin(tl.sum(tl.where(last, now, 0.0), 0))
                bias_a, bias_b = load_bias(k_bias + head * D_STATE, i, ANGLES)
                e, f = load_bias(k + (tokens - 1) * k_token, i, ANGLES)
                end_a, end_b = load_bias(d_last_k + of_head * D_STATE, i, ANGLES)
                e, f = e + bias_a, f + bias_b
                turned = (e * cos - f * sin) * end_b - (e * sin + f * cos) * end_a
                d_now += tl.where(last, turned[None, :], 0.0)
        total = tl.sum(d_now, 0)
        since = d_now - tl.cumsum(d_now, 0) + total[None, :]
        d_rate += step[:, None] * since
        tl.store(d_rotations + (of_head * ANGLES + i) * tiles + tile, total, mask=i < ANGLES)
        # A token's weights: its own, and that of the token before it.
        product = tl.load(score + of_token, mask=t < tokens, other=0.0)
        d_own = tl.load(d_weight + of_token, mask=t < tokens, other=0.0) + d_factor * product
        d_before = tl.load(d_weight + of_token - N_HEADS, mask=followed, other=0.0)
        d_step = share * d_own + (1.0 - share) * d_before + tl.sum(rates * since, 1)
        tl.store(d_dt + of_token, d_step, mask=t < tokens)
        tl.store(d_later + of_token, step * (d_own - d_before), mask=t < tokens)
        tl.store(partials + 2 * N_HEADS * D_STATE + head, tl.sum(d_factor, 0))

        d_score = (d_factor * step * share)[:, None]
        cos, sin = cos_sin(angles_of(rates, step, first, sums, of_head, i, tile, tiles, ANGLES))
        e, f = load_biased_pairs(k, k_bias, head, t, i, k_token, paired, ANGLES, PAIRS, D_STATE)
        d_a, d_b = up_a * cos + up_b * sin + d_score * e, up_b * cos - up_a * sin + d_score * f
        dq_a, dq_b = dq_a + d_a, dq_b + d_b
        of_q = tl.sum(tl.join(d_a, d_b), 0)
        tl.store(partials + head * D_STATE + c, of_q.reshape(2 * PAIRS), mask=c < 2 * ANGLES)
        a, b = load_biased_pairs(q, q_bias, head, t, i, q_token, paired, ANGLES, PAIRS, D_STATE)
        if d_last_k is not None:
            end_a, end_b = load_bias(d_last_k + of_head * D_STATE, i, ANGLES)
            up_e += tl.where(last, end_a[None, :], 0.0)
            up_f += tl.where(last, end_b[None, :], 0.0)
        d_e, d_f = up_e * cos + up_f * sin + d_score * a, up_f * cos - up_e * sin + d_score * b
        dk_a, dk_b = dk_a + d_e, dk_b + d_f
        of_k = tl.sum(tl.join(d_e, d_f), 0)
        tl.store(partials + (N_HEADS + head) * D_STATE + c, of_k.reshape(2 * PAIRS), mask=c < 2 * ANGLES)

    to = ((((block * batch).to(tl.int64) * seq_len + first_token + t) * N_GROUPS + group) * D_STATE)[:, None] + c[
        None, :
    ]
    dtype = dq_blocks.dtype.element_ty
    tl.store(dq_blocks + to, join(dq_a, dq_b, PAIRS).to(dtype), mask=paired)
    tl.store(dk_blocks + to, join(dk_a, dk_b, PAIRS).to(dtype), mask=paired)
    to = ((tl.program_id(0) * batch).to(tl.int64) * seq_len + first_token + t)[:, None] * ANGLES + i[None, :]
    tl.store(d_rates + to, d_rate, mask=there & (i < ANGLES)[None, :])


@jit
def _rest_bwd(
    dq, dk, d_skip, d_last_k, q, k, dt, later, q_bias, k_bias, dq_blocks, dk_blocks, partials,
    seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, REST: tl.constexpr,
    TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The same of the channels that do not rotate."""
    group, block, begin, end, row, top, first_token, tokens = place(seq_len, N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    t = tl.arange(0, TILE)
    tiles, batch, rest = tl.num_programs(1), tl.num_programs(2), 2 * ANGLES + tl.arange(0, REST)
    inside, last = (t < tokens)[:, None] & (rest < D_STATE)[None, :], (top + t == seq_len - 1)[:, None]
    q += row * q_row + top * q_token + group * q_group
    k += row * k_row + top * k_token + group * k_group
    dq_c, dk_c = tl.zeros((TILE, REST), tl.float32), tl.zeros((TILE, REST), tl.float32)
    partials += (row * tiles + tl.program_id(1)) * (N_HEADS * (2 * D_STATE + 1))
    dt += first_token * N_HEADS
    later += first_token * N_HEADS
    d_skip += first_token * N_HEADS
    dq += first_token * (N_HEADS * D_STATE)
    dk += first_token * (N_HEADS * D_STATE)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_token = t * N_HEADS + head
        at = of_token[:, None] * D_STATE + rest[None, :]
        d_a = tl.load(dq + at, mask=inside, other=0.0).to(tl.float32)
        d_e = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32)
        if d_last_k is not None:
            ends = tl.load(d_last_k + (row * N_HEADS + head) * D_STATE + rest, mask=rest < D_STATE, other=0.0)
            d_e += tl.where(last, ends[None, :], 0.0)
        d_score = tl.load(d_skip + of_token, mask=t < tokens, other=0.0)
        d_score *= tl.load(dt + of_token, mask=t < tokens, other=0.0)
        d_score *= tl.load(later + of_token, mask=t < tokens, other=0.0)
        d_a += d_score[:, None] * load_rest(k, k_bias + head * D_STATE, t, k_token, rest, inside, D_STATE)
        d_e += d_score[:, None] * load_rest(q, q_bias + head * D_STATE, t, q_token, rest, inside, D_STATE)
        dq_c, dk_c = dq_c + d_a, dk_c + d_e
        of_q, of_k = tl.split(tl.sum(tl.join(d_a, d_e), 0))
        tl.store(partials + head * D_STATE + rest, of_q, mask=rest < D_STATE)
        tl.store(partials + (N_HEADS + head) * D_STATE + rest, of_k, mask=rest < D_STATE)

    to = ((((block * batch).to(tl.int64) * seq_len + first_token + t) * N_GROUPS + group) * D_STATE)[:, None] + rest[
        None, :
    ]
    dtype = dq_blocks.dtype.element_ty
    tl.store(dq_blocks + to, dq_c.to(dtype), mask=inside)
    tl.store(dk_blocks + to, dk_c.to(dtype), mask=inside)


@jit
def _rotate_ends(
    rate, dt, d_rotations, d_angle, d_rates, d_dt, d_rate, seq_len, blocks, of_block,
    N_HEADS: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Program (tile, row of the batch): adds to the gradients of dt and rate what comes from the angles of later tiles, and
    to that of rate the sums over heads. d_rotations: running sums over tiles, in fp64."""
    tile, tiles, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, i = tile * TILE + tl.arange(0, TILE), tl.arange(0, PAIRS)
    inside = (t < seq_len)[:, None] & (i < ANGLES)[None, :]
    rates = load_rates(rate, row, t, i, seq_len, ANGLES)
    at = (row * seq_len + t)[:, None] * ANGLES + i[None, :]
    total = tl.zeros((TILE, PAIRS), tl.float32)
    for _ in range(blocks):
        total += tl.load(d_rates + at, mask=inside, other=0.0)
        d_rates += of_block
    for head in range(N_HEADS):
        of_head, to = row * N_HEADS + head, (row * seq_len + t) * N_HEADS + head
        sums = d_rotations + (of_head * ANGLES + i) * tiles
        behind = tl.load(sums + tiles - 1, mask=i < ANGLES, other=0.0) - tl.load(
            sums + tile, mask=i < ANGLES, other=0.0
        )
        behind = behind.to(tl.float32)
        if d_angle is not None:
            behind += tl.load(d_angle + of_head * ANGLES + i, mask=i < ANGLES, other=0.0)
        step = tl.load(dt + to, mask=t < seq_len, other=0.0)
        total += step[:, None] * behind[None, :]
        found = tl.load(d_dt + to, mask=t < seq_len, other=0.0) + tl.sum(rates * behind[None, :], 1)
        tl.store(d_dt + to, found, mask=t < seq_len)
    tl.store(d_rate + at, total, mask=inside)
