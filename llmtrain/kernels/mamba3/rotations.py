"""Queries and keys of Mamba-3's heads: biased, rotated by running sums of angles; forward.

The angles of a token are sums over all tokens so far. `rotation_sums` has those of each tile of tokens, whose running sums (taken
in fp64, a few numbers per tile) are where the next tile begins. So no tensor holds an angle of each token.
"""

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.ssd.block_scaled_fp16 import ScaledBC, exponent_of, split_exponents
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch

TILE = 16
"""Tokens of a program."""
PAIRS_PER_THREAD = 16
"""Pairs of channels of a thread, or twice as many channels that do not rotate: as many as registers hold, since a program of one
warp waits for no other."""
_LAUNCH = HeadLoopLaunch(programs_per_sm=16, num_stages=1)


def constants(q: Tensor, rate: Tensor, n_heads: int) -> dict[str, int]:
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
    first: Tensor | None, sums: Tensor, num_sms: int, scaled: int | None = None,
) -> tuple[ScaledBC, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Rotated k and q of each head, [batch, T, heads, d_state], as B and C; the factor of each token's v in its own output,
    [batch, heads, T], and q . k, [batch, T, heads], in fp32; and of the last token its angles, [batch, heads, angles], and k,
    [batch, heads, d_state], in fp32.

    first: angles of the token before the first, [batch, heads, angles]; sums: of rotation_sums; scaled: rotated k and q are
        in block-scaled fp16, by blocks of so many tokens (a multiple of TILE), else in the dtype of q.
    """
    (batch, seq_len, groups, d_state), heads = q.shape, dt.shape[2]
    wide = {"dtype": torch.float32, "device": q.device}
    dtype, exponents = q.dtype, None
    if scaled is not None:
        dtype, exponents = torch.float16, torch.empty((2, batch, cdiv(seq_len, scaled), heads), **wide)
    found = [torch.empty((batch, seq_len, heads, d_state), dtype=dtype, device=q.device) for _ in range(2)]
    skip, score = torch.empty((batch, heads, seq_len), **wide), torch.empty((batch, seq_len, heads), **wide)
    angle, last_k = torch.empty((batch, heads, rate.shape[2]), **wide), torch.empty((batch, heads, d_state), **wide)
    tiles = sums.shape[3]
    of_program = _LAUNCH.heads(heads // groups, batch * tiles * groups, num_sms)
    _rotate[groups * cdiv(heads // groups, of_program), tiles, batch](
        *(q, k, dt, later, rate, q_bias, k_bias, D, first, sums, *found, *split_exponents(exponents)),
        *(skip, score, angle, last_k, seq_len, *q.stride()[:3], *k.stride()[:3]),
        HEADS_PER_PROGRAM=of_program,
        SCALED=scaled or TILE,
        **constants(q, rate, heads),
        **_LAUNCH.options,
    )
    return ScaledBC(*found, exponents), skip, score, angle, last_k


@jit
def _rotation_sums(
    rate, dt, sums, seq_len, N_HEADS: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Program (tile, row of the batch)."""
    tile, tiles, row = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    t, i = tile * TILE + tl.arange(0, TILE), tl.arange(0, PAIRS)
    rates = load_rates(rate, row, t, i, seq_len, ANGLES)
    for head in range(N_HEADS):
        step = tl.load(dt + (row * seq_len + t) * N_HEADS + head, mask=t < seq_len, other=0.0)
        to = sums + ((row * N_HEADS + head) * ANGLES + i) * tiles + tile
        tl.store(to, tl.sum(rates * step[:, None], 0), mask=i < ANGLES)


@triton.jit
def load_rates(rate, row, t, i, seq_len, ANGLES: tl.constexpr):
    inside = (t < seq_len)[:, None] & (i < ANGLES)[None, :]
    return tl.load(rate + (row * seq_len + t)[:, None] * ANGLES + i[None, :], mask=inside, other=0.0)


@triton.jit
def angles_of(rates, step, first, sums, of_head, i, tile, tiles, ANGLES: tl.constexpr):
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
def load_pairs(base, t, i, token, inside, PAIRS: tl.constexpr):
    """The two halves of each pair of channels, [tokens, PAIRS] in fp32. inside: [tokens, 2 * PAIRS]."""
    c = tl.arange(0, 2 * PAIRS)
    both = tl.load(base + t[:, None] * token + c[None, :], mask=inside, other=0.0).to(tl.float32)
    return tl.split(both.reshape(t.shape[0], PAIRS, 2))


@triton.jit
def join(a, b, PAIRS: tl.constexpr):
    """Pairs of channels side by side. a, b: [tokens, PAIRS]."""
    return tl.join(a, b).reshape(a.shape[0], 2 * PAIRS)


@triton.jit
def load_bias(bias, i, ANGLES: tl.constexpr):
    """The two halves of each pair of one head's channels, [PAIRS] in fp32."""
    a = tl.load(bias + 2 * i, mask=i < ANGLES, other=0.0).to(tl.float32)
    return a, tl.load(bias + 2 * i + 1, mask=i < ANGLES, other=0.0).to(tl.float32)


@triton.jit
def place(
    seq_len, N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr
):  # fmt: skip
    """Group, block, first head and the one behind its last, row, the tile's first token, in its row and among those of all rows,
    and its number of tokens, of program (group and block of its heads, tile, row of the batch)."""
    PER_GROUP: tl.constexpr = N_HEADS // N_GROUPS
    BLOCKS: tl.constexpr = (PER_GROUP + HEADS_PER_PROGRAM - 1) // HEADS_PER_PROGRAM
    group, block = tl.program_id(0) // BLOCKS, tl.program_id(0) % BLOCKS
    begin = group * PER_GROUP + block * HEADS_PER_PROGRAM
    end = tl.minimum(begin + HEADS_PER_PROGRAM, (group + 1) * PER_GROUP)
    row, top = tl.program_id(2).to(tl.int64), tl.program_id(1) * TILE
    return group, block, begin, end, row, top.to(tl.int64), row * seq_len + top, tl.minimum(seq_len - top, TILE)


@triton.jit
def load_rest(x, bias, t, token, rest, inside, D_STATE: tl.constexpr):
    """Biased channels that do not rotate, [tokens, REST] in fp32."""
    found = tl.load(x + t[:, None] * token + rest[None, :], mask=inside, other=0.0).to(tl.float32)
    return found + tl.load(bias + rest, mask=rest < D_STATE, other=0.0).to(tl.float32)[None, :]


@triton.jit
def load_biased_pairs(
    x, bias, head, t, i, token, inside, ANGLES: tl.constexpr, PAIRS: tl.constexpr, D_STATE: tl.constexpr
):  # fmt: skip
    """Biased pairs of a head before they rotate. Loaded anew for each head, from the cache: over all heads they would take half of
    the registers."""
    a, b = load_pairs(x, t, i, token, inside, PAIRS)
    bias_a, bias_b = load_bias(bias + head * D_STATE, i, ANGLES)
    return a + bias_a[None, :], b + bias_b[None, :]


@triton.jit
def _largest(x, token, tokens, D_STATE: tl.constexpr, SCALED: tl.constexpr):
    """Largest magnitude of SCALED tokens' channels."""
    t, c = tl.arange(0, SCALED), tl.arange(0, triton.next_power_of_2(D_STATE))
    inside = (t < tokens)[:, None] & (c < D_STATE)[None, :]
    return tl.max(tl.abs(tl.load(x + t[:, None] * token + c[None, :], mask=inside, other=0.0).to(tl.float32)))


@triton.jit
def _exponent(largest, bias, D_STATE: tl.constexpr):
    """Exponent of biased and rotated channels, of which none exceeds 2^(1/2) times the largest before it rotates."""
    c = tl.arange(0, triton.next_power_of_2(D_STATE))
    added = tl.load(bias + c, mask=c < D_STATE, other=0.0).to(tl.float32)
    return exponent_of(1.5 * (largest + tl.max(tl.abs(added))))


@jit
def _rotate(
    q, k, dt, later, rate, q_bias, k_bias, D, first, sums, rotated_k, rotated_q, k_exponents, q_exponents,
    skip, score, angle, last_k, seq_len, q_row, q_token, q_group, k_row, k_token, k_group,
    N_HEADS: tl.constexpr, N_GROUPS: tl.constexpr, D_STATE: tl.constexpr, ANGLES: tl.constexpr, PAIRS: tl.constexpr,
    REST: tl.constexpr, TILE: tl.constexpr, HEADS_PER_PROGRAM: tl.constexpr, SCALED: tl.constexpr,
):  # fmt: skip
    """Program (group and block of its heads, tile, row of the batch). Tiles of one block of SCALED tokens have one exponent."""
    group, _, begin, end, row, top, first_token, tokens = place(seq_len, N_HEADS, N_GROUPS, TILE, HEADS_PER_PROGRAM)
    t = tl.arange(0, TILE)  # tokens of the tile, by which it is read with small offsets
    tile, tiles, i = tl.program_id(1), tl.num_programs(1), tl.arange(0, PAIRS)
    c, rest = tl.arange(0, 2 * PAIRS), 2 * ANGLES + tl.arange(0, REST if REST > 0 else 1)
    there, last = (t < tokens)[:, None], (top + t == seq_len - 1)[:, None]
    paired, unpaired = there & (c < 2 * ANGLES)[None, :], there & (rest < D_STATE)[None, :]
    q += row * q_row + top * q_token + group * q_group
    k += row * k_row + top * k_token + group * k_group
    scaled = tile // (SCALED // TILE)
    if k_exponents is not None:
        before = top - scaled * SCALED
        largest_q = _largest(q - before * q_token, q_token, seq_len - scaled * SCALED, D_STATE, SCALED)
        largest_k = _largest(k - before * k_token, k_token, seq_len - scaled * SCALED, D_STATE, SCALED)
        of_scaled = (row * ((seq_len + SCALED - 1) // SCALED) + scaled) * N_HEADS
    rates = load_rates(rate + first_token * ANGLES, 0, t, i, tokens, ANGLES)
    dt += first_token * N_HEADS
    later += first_token * N_HEADS
    score += first_token * N_HEADS
    rotated_q += first_token * (N_HEADS * D_STATE)
    rotated_k += first_token * (N_HEADS * D_STATE)
    skip += row * N_HEADS * seq_len + top
    for head in range(begin, end):
        of_token, of_head = t * N_HEADS + head, row * N_HEADS + head
        step = tl.load(dt + of_token, mask=t < tokens, other=0.0)
        now = angles_of(rates, step, first, sums, of_head, i, tile, tiles, ANGLES)
        cos, sin = cos_sin(now)
        a, b = load_biased_pairs(q, q_bias, head, t, i, q_token, paired, ANGLES, PAIRS, D_STATE)
        e, f = load_biased_pairs(k, k_bias, head, t, i, k_token, paired, ANGLES, PAIRS, D_STATE)
        product = tl.sum(a * e + b * f, 1)
        q_scale, k_scale = 1.0, 1.0
        if k_exponents is not None:
            q_exponent = _exponent(largest_q, q_bias + head * D_STATE, D_STATE)
            k_exponent = _exponent(largest_k, k_bias + head * D_STATE, D_STATE)
            tl.store(q_exponents + of_scaled + head, q_exponent, mask=top == scaled * SCALED)
            tl.store(k_exponents + of_scaled + head, k_exponent, mask=top == scaled * SCALED)
            q_scale, k_scale = tl.exp2(-q_exponent), tl.exp2(-k_exponent)
        to = of_token[:, None] * D_STATE + c[None, :]
        rotated = join(a * cos - b * sin, a * sin + b * cos, PAIRS)
        tl.store(rotated_q + to, (rotated * q_scale).to(rotated_q.dtype.element_ty), mask=paired)
        rotated = join(e * cos - f * sin, e * sin + f * cos, PAIRS)
        tl.store(rotated_k + to, (rotated * k_scale).to(rotated_k.dtype.element_ty), mask=paired)
        if tile == tiles - 1:
            ends = tl.broadcast_to((last_k + of_head * D_STATE + c)[None, :], (TILE, 2 * PAIRS))
            tl.store(ends, rotated, mask=paired & last)
            ends = tl.broadcast_to((angle + of_head * ANGLES + i)[None, :], (TILE, PAIRS))
            tl.store(ends, now, mask=last & (i < ANGLES)[None, :])
        if REST > 0:
            a = load_rest(q, q_bias + head * D_STATE, t, q_token, rest, unpaired, D_STATE)
            e = load_rest(k, k_bias + head * D_STATE, t, k_token, rest, unpaired, D_STATE)
            product += tl.sum(a * e, 1)
            to = of_token[:, None] * D_STATE + rest[None, :]
            tl.store(rotated_q + to, (a * q_scale).to(rotated_q.dtype.element_ty), mask=unpaired)
            tl.store(rotated_k + to, (e * k_scale).to(rotated_k.dtype.element_ty), mask=unpaired)
            if tile == tiles - 1:
                ends = tl.broadcast_to((last_k + of_head * D_STATE + rest)[None, :], (TILE, REST))
                tl.store(ends, e, mask=unpaired & last)
        own = step * tl.load(later + of_token, mask=t < tokens, other=0.0)
        factor = tl.load(D + head).to(tl.float32) + own * product
        tl.store(skip + head * seq_len + t, factor, mask=t < tokens)
        tl.store(score + of_token, product, mask=t < tokens)
