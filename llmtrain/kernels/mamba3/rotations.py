"""Queries and keys of Mamba-3's heads: biased, rotated by running sums of angles; and what comes back through them.

The angles of a token are sums over all tokens so far. `rotation_sums` has those of each tile of tokens, whose running sums (taken
in fp64, a few numbers per tile) are where the next tile begins. So no tensor holds an angle of each token.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.reduce_partials import reduce_partials
from llmtrain.kernels.ssd.chunk_cumsum import load_documents
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

TILE = 32
"""Tokens of a program."""
PAIRS_PER_THREAD = 8
"""Pairs of channels of a thread, or twice as many channels that do not rotate; what a program holds of twice as many does not fit
into registers."""
_FORWARD = HeadLoopLaunch(programs_per_sm=8, num_stages=1)
_BACKWARD = HeadLoopLaunch(programs_per_sm=4, num_stages=1)


def sizes(q: Tensor, rate: Tensor, n_heads: int) -> dict[str, int]:
    """Constants of the kernels, and their warps. q: [batch, T, groups, d_state]; rate: [batch, T, angles]."""
    angles, rest = rate.shape[2], q.shape[3] - 2 * rate.shape[2]
    pairs, rest = next_power_of_2(angles), max(2, next_power_of_2(rest)) if rest else 0
    warps = TILE * max(pairs, rest // 2) // (32 * PAIRS_PER_THREAD)
    return {
        "N_HEADS": n_heads, "N_GROUPS": q.shape[2], "D_STATE": q.shape[3], "ANGLES": angles, "PAIRS": pairs, "REST": rest,
        "TILE": TILE, "num_warps": min(max(warps, 1), 8),
    }  # fmt: skip


def rotation_sums(rate: Tensor, dt: Tensor) -> Tensor:
    """Angles from the first token to the end of each tile, less whole turns, [batch, heads, angles, tiles] in fp32. rate: [batch,
    T, angles]; dt: [batch, T, heads]; fp32 and contiguous."""
    (batch, seq_len, angles), heads = rate.shape, dt.shape[2]
    sums = torch.empty((batch, heads, angles, cdiv(seq_len, TILE)), dtype=torch.float32, device=dt.device)
    _rotation_sums[sums.shape[3], batch](
        rate, dt, sums, seq_len, N_HEADS=heads, ANGLES=angles, PAIRS=next_power_of_2(angles), TILE=TILE, num_warps=1
    )
    return sums.cumsum(3, dtype=torch.float64).remainder(2 * math.pi).float()


def rotate(
    q: Tensor, k: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor, k_bias: Tensor, D: Tensor,
    first: Tensor | None, sums: Tensor, num_sms: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated q and k of each head, [batch, T, heads, d_state]; the factor of each token's v in its own output, [batch, heads, T],
    and q . k, [batch, T, heads], in fp32; and of the last token its angles, [batch, heads, angles], and k, [batch, heads, d_state],
    in fp32.

    first: angles of the token before the first, [batch, heads, angles]; sums: of rotation_sums.
    """
    (batch, seq_len, groups, d_state), heads = q.shape, dt.shape[2]
    wide = {"dtype": torch.float32, "device": q.device}
    found = [torch.empty((batch, seq_len, heads, d_state), dtype=q.dtype, device=q.device) for _ in range(2)]
    skip, score = torch.empty((batch, heads, seq_len), **wide), torch.empty((batch, seq_len, heads), **wide)
    angle, last_k = torch.empty((batch, heads, rate.shape[2]), **wide), torch.empty((batch, heads, d_state), **wide)
    tiles = sums.shape[3]
    of_program = _FORWARD.heads(heads // groups, batch * tiles * groups, num_sms)
    _rotate[groups * cdiv(heads // groups, of_program), tiles, batch](
        *(q, k, dt, later, rate, q_bias, k_bias, D, first, sums, *found, skip, score, angle, last_k, seq_len),
        *(*q.stride()[:3], *k.stride()[:3]),
        HEADS_PER_PROGRAM=of_program,
        **sizes(q, rate, heads),
        **_FORWARD.options,
    )
    return found[0], found[1], skip, score, angle, last_k


def rotate_bwd(
    dq: Tensor, dk: Tensor, d_weight: Tensor, d_skip: Tensor, d_angle: Tensor | None, d_last_k: Tensor | None, score: Tensor,
    q: Tensor, k: Tensor, dt: Tensor, later: Tensor, rate: Tensor, q_bias: Tensor, k_bias: Tensor, D: Tensor, first: Tensor | None,
    sums: Tensor, document_ids: Tensor | None, num_sms: int,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients of q, k, dt, later, rate, q_bias, k_bias, D and first, from those of `rotate`'s results and of the tokens'
    weights (decays_bwd). d_angle, d_last_k: of the last token, if they are wanted; score: of `rotate`."""
    (batch, seq_len, groups, d_state), heads = q.shape, dt.shape[2]
    tiles, angles = sums.shape[3], rate.shape[2]
    of_program = _BACKWARD.heads(heads // groups, batch * tiles * groups, num_sms)
    blocks = cdiv(heads // groups, of_program)
    wide = {"dtype": torch.float32, "device": q.device}
    of_blocks = {"dtype": q.dtype if blocks == 1 else torch.float32, "device": q.device}
    found = [torch.empty((blocks, *q.shape), **of_blocks) for _ in range(2)]
    d_rates = torch.empty((groups * blocks, *rate.shape), **wide)
    d_dt, d_later, d_rate = torch.empty_like(dt), torch.empty_like(later), torch.empty_like(rate)
    # Of a tile, sums of its angles' gradients; of its heads, those of the biases and of D.
    d_rotations = torch.empty((batch, heads, angles, tiles), **wide)
    partials = torch.empty((batch * tiles, heads * (2 * d_state + 1)), **wide)
    constants, grid = sizes(q, rate, heads), (groups * blocks, tiles, batch)
    rest, places = constants.pop("REST"), (seq_len, *q.stride()[:3], *k.stride()[:3])
    launch = {"HEADS_PER_PROGRAM": of_program, "NUM_STAGES": _BACKWARD.num_stages, **_BACKWARD.options}
    _rotate_bwd[grid](
        *(dq, dk, d_weight, d_skip, score, d_last_k, q, k, dt, later, rate, q_bias, k_bias, first, sums, document_ids),
        *(*found, d_dt, d_later, d_rates, d_rotations, partials, *places),
        **constants,
        **launch,
    )
    if rest:
        del constants["PAIRS"]
        _rest_bwd[grid](
            *(dq, dk, d_skip, d_last_k, q, k, dt, later, q_bias, k_bias, *found, partials, *places),
            REST=rest,
            **constants,
            **launch,
        )
    d_rotations = d_rotations.cumsum(3, dtype=torch.float64)
    _rotate_ends[tiles, batch](
        rate, dt, d_rotations, d_angle, d_rates, d_dt, d_rate, seq_len, groups * blocks, batch * seq_len * angles,
        N_HEADS=heads, ANGLES=angles, PAIRS=next_power_of_2(angles), TILE=TILE, num_warps=4,
    )  # fmt: skip
    d_biases = [torch.empty_like(t) for t in (q_bias, k_bias, D)]
    reduce_partials(partials, *d_biases)
    d_q, d_k = (t[0] if blocks == 1 else t.sum(0).to(q.dtype) for t in found)
    d_first = dt.new_empty(0)
    if first is not None:
        d_first = d_rotations[..., -1].float() if d_angle is None else d_rotations[..., -1].float() + d_angle
    return d_q, d_k, d_dt, d_later, d_rate, *d_biases, d_first


@jit
def _rotation_sums(
    rate, dt, sums, seq_len, N_HEADS: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Program (tile, row of the batch)."""
    tile, tiles, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, i = tile * TILE + tl.arange(0, TILE), tl.arange(0, PAIRS)
    rates = _load_rates(rate, row, t, i, seq_len, ANGLES)
    for head in range(N_HEADS):
        step = tl.load(dt + (row * seq_len + t) * N_HEADS + head, mask=t < seq_len, other=0.0)
        to = sums + ((row * N_HEADS + head) * ANGLES + i) * tiles + tile
        tl.store(to, tl.sum(rates * step[:, None], 0), mask=i < ANGLES)


@triton.jit
def _load_rates(rate, row, t, i, seq_len, ANGLES: tl.constexpr):
    inside = (t < seq_len)[:, None] & (i < ANGLES)[None, :]
    return tl.load(rate + (row * seq_len + t)[:, None] * ANGLES + i[None, :], mask=inside, other=0.0)


@triton.jit
def _angles(rates, step, first, sums, of_head, i, tile, tiles, ANGLES: tl.constexpr):
    """Angles of a tile's tokens, [TILE, PAIRS]. of_head: head, counted over all rows."""
    begin = tl.load(sums + (of_head * ANGLES + i) * tiles + tile - 1, mask=(i < ANGLES) & (tile > 0), other=0.0)
    if first is not None:
        begin += tl.load(first + of_head * ANGLES + i, mask=i < ANGLES, other=0.0)
    return tl.cumsum(rates * step[:, None], 0) + begin[None, :]


@triton.jit
def cos_sin(x):
    """Cosine and sine to fp32's accuracy, of radians below 1e4 in magnitude: what needs more is taken off before.

    By their series between -pi/4 and pi/4, at the distance to the nearest multiple of pi/2, which is taken off in three parts, the
    first of few bits. tl.cos and tl.sin each have a branch for huge arguments, with memory of its own.
    """
    quarters = tl.floor(x * 0.6366197723675814 + 0.5)
    r = ((x - quarters * 1.5703125) - quarters * 4.837512969970703125e-4) - quarters * 7.54978995489188e-8
    s = r * r
    near_sin = r + r * s * (-1 / 6 + s * (1 / 120 + s * (-1 / 5040 + s * (1 / 362880))))
    near_cos = 1.0 + s * (-1 / 2 + s * (1 / 24 + s * (-1 / 720 + s * (1 / 40320))))
    quarter = quarters.to(tl.int32) & 3
    odd = (quarter & 1) == 1
    cos, sin = tl.where(odd, near_sin, near_cos), tl.where(odd, near_cos, near_sin)
    return tl.where((quarter == 1) | (quarter == 2), -cos, cos), tl.where(quarter >= 2, -sin, sin)


@triton.jit
def _load_pairs(base, t, i, token, inside, PAIRS: tl.constexpr):
    """The two halves of each pair of channels, [tokens, PAIRS] in fp32. inside: [tokens, 2 * PAIRS]."""
    c = tl.arange(0, 2 * PAIRS)
    both = tl.load(base + t[:, None] * token + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.split(both.reshape(t.shape[0], PAIRS, 2))


@triton.jit
def _join(a, b, PAIRS: tl.constexpr):
    """Pairs of channels side by side. a, b: [tokens, PAIRS]."""
    return tl.join(a, b).reshape(a.shape[0], 2 * PAIRS)


@triton.jit
def _load_bias(bias, head, i, ANGLES: tl.constexpr, D_STATE: tl.constexpr):
    at = bias + head * D_STATE + 2 * i
    a = tl.load(at, mask=i < ANGLES, other=0.0).to(tl.float32)
    return a[None, :], tl.load(at + 1, mask=i < ANGLES, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _place(
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr
):  # fmt: skip
    """Group, block, first head and the one behind its last, row, and tokens, of program (group and block of its heads, tile, row of
    the batch)."""
    PER_GROUP: tl.constexpr = N_HEADS // N_GROUPS
    BLOCKS: tl.constexpr = (PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    begin = group * PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * PER_GROUP)
    return group, block, begin, end, tl.program_id(2).to(tl.int64), tl.program_id(1) * TILE + tl.arange(0, TILE)


@triton.jit
def _load_rest(x, bias, t, token, rest, inside, D_STATE: tl.constexpr):
    """Biased channels that do not rotate, [tokens, REST] in fp32."""
    found = tl.load(x + t[:, None].to(tl.int64) * token + rest[None, :], mask=inside, other=0.0).to(tl.float32)
    return found + tl.load(bias + rest, mask=rest < D_STATE, other=0.0).to(tl.float32)[None, :]


@triton.jit
def _load_biased_pairs(
    x, bias, head, t, i, token, inside, ANGLES: tl.constexpr, PAIRS: tl.constexpr, D_STATE: tl.constexpr
):  # fmt: skip
    """Biased pairs of a head before they rotate. Loaded anew for each head, from the cache: over all heads they would take half of
    the registers."""
    a, b = _load_pairs(x, t.to(tl.int64), i, token, inside, PAIRS)
    bias_a, bias_b = _load_bias(bias, head, i, ANGLES, D_STATE)
    return a + bias_a, b + bias_b


@jit
def _rotate(
    q, k, dt, later, rate, q_bias, k_bias, D, first, sums, rotated_q, rotated_k, skip, score, angle, last_k,
    seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch)."""
    group, _, begin, end, row, t = _place(N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    tile, tiles, i = tl.program_id(1), tl.num_programs(1), tl.arange(0, PAIRS)
    c, rest = tl.arange(0, 2 * PAIRS), 2 * ANGLES + tl.arange(0, REST if REST > 0 else 1)
    there, last = (t < seq_len)[:, None], (t == seq_len - 1)[:, None]
    paired, unpaired = there & (c < 2 * ANGLES)[None, :], there & (rest < D_STATE)[None, :]
    q += row * q_row + group * q_group
    k += row * k_row + group * k_group
    rates = _load_rates(rate, row, t, i, seq_len, ANGLES)
    for head in range(begin, end):
        of_token, of_head = (row * seq_len + t) * N_HEADS + head, row * N_HEADS + head
        step = tl.load(dt + of_token, mask=t < seq_len, other=0.0)
        now = _angles(rates, step, first, sums, of_head, i, tile, tiles, ANGLES)
        cos, sin = cos_sin(now)
        a, b = _load_biased_pairs(q, q_bias, head, t, i, q_token, paired, ANGLES, PAIRS, D_STATE)
        e, f = _load_biased_pairs(k, k_bias, head, t, i, k_token, paired, ANGLES, PAIRS, D_STATE)
        product = tl.sum(a * e + b * f, 1)
        to = of_token[:, None] * D_STATE + c[None, :]
        tl.store(rotated_q + to, _join(a * cos - b * sin, a * sin + b * cos, PAIRS).to(q.dtype.element_ty), mask=paired)
        rotated = _join(e * cos - f * sin, e * sin + f * cos, PAIRS)
        tl.store(rotated_k + to, rotated.to(k.dtype.element_ty), mask=paired)
        if tile == tiles - 1:
            ends = tl.broadcast_to((last_k + of_head * D_STATE + c)[None, :], (TILE, 2 * PAIRS))
            tl.store(ends, rotated, mask=paired & last)
            ends = tl.broadcast_to((angle + of_head * ANGLES + i)[None, :], (TILE, PAIRS))
            tl.store(ends, now, mask=last & (i < ANGLES)[None, :])
        if REST > 0:
            a = _load_rest(q, q_bias + head * D_STATE, t, q_token, rest, unpaired, D_STATE)
            e = _load_rest(k, k_bias + head * D_STATE, t, k_token, rest, unpaired, D_STATE)
            product += tl.sum(a * e, 1)
            to = of_token[:, None] * D_STATE + rest[None, :]
            tl.store(rotated_q + to, a.to(q.dtype.element_ty), mask=unpaired)
            tl.store(rotated_k + to, e.to(k.dtype.element_ty), mask=unpaired)
            if tile == tiles - 1:
                ends = tl.broadcast_to((last_k + of_head * D_STATE + rest)[None, :], (TILE, REST))
                tl.store(ends, e, mask=unpaired & last)
        own = step * tl.load(later + of_token, mask=t < seq_len, other=0.0)
        factor = tl.load(D + head).to(tl.float32) + own * product
        tl.store(skip + of_head * seq_len + t, factor, mask=t < seq_len)
        tl.store(score + of_token, product, mask=t < seq_len)


@triton.jit
def _turn(a, b, cos, sin, up_a, up_b, dtype: tl.constexpr):
    """Gradients of angles, [tokens, PAIRS], from those of rotated pairs: of these as the scan read them, rounded, since its
    gradients cancel over tokens with no others."""
    return (a * cos - b * sin).to(dtype).to(tl.float32) * up_b - (a * sin + b * cos).to(dtype).to(tl.float32) * up_a


@jit
def _rotate_bwd(
    dq, dk, d_weight, d_skip, score, d_last_k, q, k, dt, later, rate, q_bias, k_bias, first, sums, document_ids,
    dq_blocks, dk_blocks, d_dt, d_later, d_rates, d_rotations, partials,
    seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr,
    TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch): loops over heads, and sums over them.

    The gradient of an angle is a db - b da of each pair (a, b) of q and of k, rotated or not, and their gradients. It acts on
    the time steps of all tokens up to this one: within the tile here, of tiles before it by `d_rotations`.
    """
    group, block, begin, end, row, t = _place(N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    tile, tiles, batch, i = tl.program_id(1), tl.num_programs(1), tl.num_programs(2), tl.arange(0, PAIRS)
    c = tl.arange(0, 2 * PAIRS)
    there, last = (t < seq_len)[:, None], (t == seq_len - 1)[:, None]
    paired = there & (c < 2 * ANGLES)[None, :]
    q += row * q_row + group * q_group
    k += row * k_row + group * k_group
    rates = _load_rates(rate, row, t, i, seq_len, ANGLES)
    zero = tl.zeros((TILE, PAIRS), tl.float32)
    dq_a, dq_b, dk_a, dk_b, d_rate = zero, zero, zero, zero, zero
    partials += (row * tiles + tile) * (N_HEADS * (2 * D_STATE + 1))
    followed = (t > 0) & (t < seq_len)
    if document_ids is not None:
        this, before = load_documents(document_ids, row, t, seq_len)
        followed = followed & (this == before)
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_token, of_head = (row * seq_len + t) * N_HEADS + head, row * N_HEADS + head
        at = of_token.to(tl.int64) * D_STATE
        up_a, up_b = _load_pairs(dq, at, i, 1, paired, PAIRS)
        up_e, up_f = _load_pairs(dk, at, i, 1, paired, PAIRS)
        if d_last_k is not None:
            end_a, end_b = _load_bias(d_last_k + of_head * D_STATE, 0, i, ANGLES, D_STATE)
            up_e, up_f = up_e + tl.where(last, end_a, 0.0), up_f + tl.where(last, end_b, 0.0)
        step = tl.load(dt + of_token, mask=t < seq_len, other=0.0)
        share = tl.load(later + of_token, mask=t < seq_len, other=0.0)
        d_factor = tl.load(d_skip + of_token, mask=t < seq_len, other=0.0)
        d_score = (d_factor * step * share)[:, None]
        cos, sin = cos_sin(_angles(rates, step, first, sums, of_head, i, tile, tiles, ANGLES))
        a, b = _load_biased_pairs(q, q_bias, head, t, i, q_token, paired, ANGLES, PAIRS, D_STATE)
        e, f = _load_biased_pairs(k, k_bias, head, t, i, k_token, paired, ANGLES, PAIRS, D_STATE)
        d_now = _turn(a, b, cos, sin, up_a, up_b, q.dtype.element_ty)  # what comes by the token's own score cancels
        d_now += _turn(e, f, cos, sin, up_e, up_f, k.dtype.element_ty)
        d_a, d_b = up_a * cos + up_b * sin + d_score * e, up_b * cos - up_a * sin + d_score * f
        d_e, d_f = up_e * cos + up_f * sin + d_score * a, up_f * cos - up_e * sin + d_score * b
        dq_a, dq_b, dk_a, dk_b = dq_a + d_a, dq_b + d_b, dk_a + d_e, dk_b + d_f
        # One sum over tokens for all: each makes the warps wait for each other.
        of_q, of_k = tl.split(tl.sum(tl.join(tl.join(d_a, d_b), tl.join(d_e, d_f)), 0))
        tl.store(partials + head * D_STATE + c, of_q.reshape(2 * PAIRS), mask=c < 2 * ANGLES)
        tl.store(partials + (N_HEADS + head) * D_STATE + c, of_k.reshape(2 * PAIRS), mask=c < 2 * ANGLES)
        tl.store(partials + 2 * N_HEADS * D_STATE + head, tl.sum(d_factor, 0))
        total = tl.sum(d_now, 0)
        since = d_now - tl.cumsum(d_now, 0) + total[None, :]
        d_rate += step[:, None] * since
        tl.store(d_rotations + (of_head * ANGLES + i) * tiles + tile, total, mask=i < ANGLES)
        # A token's weights: its own, and that of the token before it.
        product = tl.load(score + of_token, mask=t < seq_len, other=0.0)
        d_own = tl.load(d_weight + of_token, mask=t < seq_len, other=0.0) + d_factor * product
        d_before = tl.load(d_weight + of_token - N_HEADS, mask=followed, other=0.0)
        d_step = share * d_own + (1.0 - share) * d_before + tl.sum(rates * since, 1)
        tl.store(d_dt + of_token, d_step, mask=t < seq_len)
        tl.store(d_later + of_token, step * (d_own - d_before), mask=t < seq_len)

    to = ((((block * batch + row) * seq_len + t) * N_GROUPS + group) * D_STATE)[:, None] + c[None, :]
    dtype = dq_blocks.dtype.element_ty
    tl.store(dq_blocks + to, _join(dq_a, dq_b, PAIRS).to(dtype), mask=paired)
    tl.store(dk_blocks + to, _join(dk_a, dk_b, PAIRS).to(dtype), mask=paired)
    to = ((tl.program_id(0) * batch + row) * seq_len + t)[:, None] * ANGLES + i[None, :]
    tl.store(d_rates + to, d_rate, mask=there & (i < ANGLES)[None, :])


@jit
def _rest_bwd(
    dq, dk, d_skip, d_last_k, q, k, dt, later, q_bias, k_bias, dq_blocks, dk_blocks, partials,
    seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, REST: tl.constexpr,
    TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The same of the channels that do not rotate."""
    group, block, begin, end, row, t = _place(N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    tiles, batch, rest = tl.num_programs(1), tl.num_programs(2), 2 * ANGLES + tl.arange(0, REST)
    inside, last = (t < seq_len)[:, None] & (rest < D_STATE)[None, :], (t == seq_len - 1)[:, None]
    q += row * q_row + group * q_group
    k += row * k_row + group * k_group
    dq_c, dk_c = tl.zeros((TILE, REST), tl.float32), tl.zeros((TILE, REST), tl.float32)
    partials += (row * tiles + tl.program_id(1)) * (N_HEADS * (2 * D_STATE + 1))
    for head in tl.range(begin, end, num_stages=NUM_STAGES):
        of_token = (row * seq_len + t) * N_HEADS + head
        at = of_token.to(tl.int64)[:, None] * D_STATE + rest[None, :]
        d_a = tl.load(dq + at, mask=inside, other=0.0).to(tl.float32)
        d_e = tl.load(dk + at, mask=inside, other=0.0).to(tl.float32)
        if d_last_k is not None:
            ends = tl.load(d_last_k + (row * N_HEADS + head) * D_STATE + rest, mask=rest < D_STATE, other=0.0)
            d_e += tl.where(last, ends[None, :], 0.0)
        d_score = tl.load(d_skip + of_token, mask=t < seq_len, other=0.0)
        d_score *= tl.load(dt + of_token, mask=t < seq_len, other=0.0)
        d_score *= tl.load(later + of_token, mask=t < seq_len, other=0.0)
        d_a += d_score[:, None] * _load_rest(k, k_bias + head * D_STATE, t, k_token, rest, inside, D_STATE)
        d_e += d_score[:, None] * _load_rest(q, q_bias + head * D_STATE, t, q_token, rest, inside, D_STATE)
        dq_c, dk_c = dq_c + d_a, dk_c + d_e
        of_q, of_k = tl.split(tl.sum(tl.join(d_a, d_e), 0))
        tl.store(partials + head * D_STATE + rest, of_q, mask=rest < D_STATE)
        tl.store(partials + (N_HEADS + head) * D_STATE + rest, of_k, mask=rest < D_STATE)

    to = ((((block * batch + row) * seq_len + t) * N_GROUPS + group) * D_STATE)[:, None] + rest[None, :]
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
    rates = _load_rates(rate, row, t, i, seq_len, ANGLES)
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
