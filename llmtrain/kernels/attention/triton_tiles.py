"""Device functions of the attention kernels: tiles whose width is no power of two, and the keys that a query sees.

Width. Triton's tiles are powers of two wide. A head_dim of another width is cut into parts (160 = 128 + 32), each a
tile of its own: padding 160 to 256 would cost 1.6 x the products, the shared memory and the registers. A tile of width
head_dim is therefore a tuple of tensors here. A launch can ask for parts of one width instead, of which the last is
padded with zeros: 96 as 128 multiplies a third more, but in one product instead of two, and TMA can load it.

Visible range. Under causality, a sliding window, documents and the end of the sequence alike, query i sees the keys of one
interval, and neither end of the interval falls when i grows. So the keys of a tile of queries, and those that all of its
queries see (their tiles need no mask), follow from its first and its last query alone. For the queries that a key sees, the
same holds with the directions in time exchanged.
"""

import triton
import triton.language as tl

from llmtrain.kernels.sigmoid import sigmoid

LOG2_E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-1e38)  # below every score, and finite: -inf - -inf would be NaN


def parts_of(head_dim: int, part: int | None = None) -> tuple[int, ...]:
    """Widths of the tiles that make up head_dim, at most 256: powers of two from 16 on, falling.

    part: as many tiles of this width as are needed instead, but where a head is one narrower tile.
    """
    if part is not None and (head_dim >= part or head_dim & (head_dim - 1)):
        return (part,) * -(-head_dim // part)
    rounded = (head_dim + 15) // 16 * 16
    return tuple(1 << bit for bit in reversed(range(4, 9)) if rounded >> bit & 1)


@triton.constexpr_function
def width(parts, i):
    """Width of part i: parts[i], which Triton does not accept in a shape."""
    return parts[i]


@triton.constexpr_function
def before(parts, i):
    """Number of columns in front of part i."""
    return sum(parts[:i])


@triton.constexpr_function
def padded(parts, head_dim, i):
    """True if part i is wider than what is left of head_dim."""
    return sum(parts[: i + 1]) > head_dim


@triton.jit
def program_tile(tiles, pairs, pairs_in_flight):
    """(tile, pair) of this program: `pairs_in_flight` pairs of sequence and head at a time, their first tiles first.

    All programs that run at once then share few enough keys and values for the L2 cache.
    """
    at = tl.program_id(0)
    done = at // (tiles * pairs_in_flight) * pairs_in_flight
    here = tl.minimum(pairs_in_flight, pairs - done)
    at = at % (tiles * pairs_in_flight)
    return at // here, done + at % here


@triton.jit
def load_rows(
    source, batch, head, start, limit, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    MASKED: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows start .. start + ROWS of [T, head_dim] as parts; zeros, not read, from row `limit` on if MASKED.

    source: a pointer to row 0 (batch and head are not used), or with USE_TMA, a tensor descriptor, for a T (the limit) in whole
    tiles and parts of one width: TMA then computes the addresses. Of [batch * T, heads * head_dim]; or where the last part is
    wider than what is left, of [heads, batch * T, head_dim], beyond whose ends TMA reads zeros.
    """
    if USE_TMA:
        out = ()
        for i in tl.static_range(len(PARTS)):
            if padded(PARTS, HEAD_DIM, len(PARTS) - 1):
                tile = source.load([head, batch * limit + start, before(PARTS, i)])
                out = out + (tile.reshape([ROWS, width(PARTS, i)]),)
            else:
                out = out + (source.load([batch * limit + start, head * HEAD_DIM + before(PARTS, i)]),)
        return out
    else:
        row = tl.arange(0, ROWS)
        base = source + start * stride
        out = ()
        for i in tl.static_range(len(PARTS)):
            column = before(PARTS, i) + tl.arange(0, PARTS[i])
            at = base + (row[:, None] * stride + column[None, :])
            if MASKED and padded(PARTS, HEAD_DIM, i):
                tile = tl.load(at, mask=(row < limit - start)[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
            elif MASKED:
                tile = tl.load(at, mask=(row < limit - start)[:, None], other=0.0)
            elif padded(PARTS, HEAD_DIM, i):
                tile = tl.load(at, mask=(column < HEAD_DIM)[None, :], other=0.0)
            else:
                tile = tl.load(at)
            out = out + (tile,)
        return out


@triton.jit
def in_registers(tile, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """The same tile, of 16-bit numbers, as a left operand that stays in registers over a loop of products.

    A tile that comes from a load, Triton puts into shared memory, from which Hopper reads it again for every product. The sum with
    a product, of zeros, has the layout of products, of which that of left operands is a renaming.
    """
    out = ()
    for i in tl.static_range(len(PARTS)):
        left, right = tl.zeros((ROWS, 16), tile[i].dtype), tl.zeros((16, width(PARTS, i)), tile[i].dtype)
        out = out + ((tile[i].to(tl.float32) + tl.dot(left, right)).to(tile[i].dtype),)
    return out


@triton.jit
def store_rows(
    target, tiles, factor, start, limit, stride, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr
):
    """Rows start .. start + ROWS of target[T, head_dim], those below `limit`, become tiles * factor."""
    row = tl.arange(0, ROWS)
    base = target + start * stride
    for i in tl.static_range(len(PARTS)):
        column = before(PARTS, i) + tl.arange(0, PARTS[i])
        mask = (row < limit - start)[:, None]
        if padded(PARTS, HEAD_DIM, i):
            mask = mask & (column < HEAD_DIM)[None, :]
        tile = (tiles[i] * factor).to(target.dtype.element_ty)
        tl.store(base + (row[:, None] * stride + column[None, :]), tile, mask=mask)


@triton.jit
def zeros(ROWS: tl.constexpr, PARTS: tl.constexpr):
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + (tl.zeros((ROWS, width(PARTS, i)), tl.float32),)
    return out


@triton.jit
def dot_transposed(a, b, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """a b^T, summed over the parts of head_dim. a: [A, head_dim], b: [B, head_dim] -> [A, B] in fp32."""
    product = tl.dot(a[0], tl.trans(b[0]), input_precision=PRECISION)
    for i in tl.static_range(1, len(PARTS)):
        product = tl.dot(a[i], tl.trans(b[i]), product, input_precision=PRECISION)
    return product


@triton.jit
def dot_accumulate(weight, b, acc, PARTS: tl.constexpr, PRECISION: tl.constexpr):
    """acc + weight b. weight: [A, B], rounded to b's type; b: [B, head_dim]; acc: [A, head_dim]."""
    weight = weight.to(b[0].dtype)
    out = ()
    for i in tl.static_range(len(PARTS)):
        out = out + (tl.dot(weight, b[i], acc[i], input_precision=PRECISION),)
    return out


@triton.jit
def visible_range(i, starts, ends, seq_len, LOOK_BACK: tl.constexpr, LOOK_AHEAD: tl.constexpr):
    """First and last token that the tokens `i` (one or many) see: at most LOOK_BACK before and LOOK_AHEAD after; None: all.

    starts, ends: the documents of this sequence, or None. The result is arbitrary for tokens beyond the sequence.
    """
    first = i * 0 if LOOK_BACK is None else tl.maximum(i - LOOK_BACK, 0)
    last = i * 0 + (seq_len - 1) if LOOK_AHEAD is None else tl.minimum(i + LOOK_AHEAD, seq_len - 1)
    if starts is not None:
        first = tl.maximum(first, tl.load(starts + i, mask=i < seq_len, other=0))
        last = tl.minimum(last, tl.load(ends + i, mask=i < seq_len, other=0))
    return first, last


@triton.jit
def tile_ranges(
    begin, starts, ends, seq_len, ROWS: tl.constexpr, TILE: tl.constexpr, LOOK_BACK: tl.constexpr,
    LOOK_AHEAD: tl.constexpr,
):  # fmt: skip
    """Range of the other tokens that the tokens begin .. begin + ROWS see, in tiles of TILE: (a, b, c, end).

    a .. b and c .. end need a mask; b .. c is seen by all of them and ends before the sequence does.
    """
    final = tl.minimum(begin + ROWS, seq_len) - 1
    earliest, all_to = visible_range(begin, starts, ends, seq_len, LOOK_BACK, LOOK_AHEAD)
    all_from, latest = visible_range(final, starts, ends, seq_len, LOOK_BACK, LOOK_AHEAD)
    a = earliest // TILE * TILE
    end = latest + 1
    b = tl.minimum(tl.maximum(tl.cdiv(all_from, TILE) * TILE, a), tl.cdiv(end, TILE) * TILE)
    c = tl.maximum((all_to + 1) // TILE * TILE, b)
    return a, b, c, end


@triton.jit
def in_range(other, first, last, LOWER: tl.constexpr, UPPER: tl.constexpr):
    """first <= other <= last; without LOWER or UPPER, only the other half of the condition."""
    if LOWER and UPPER:
        return (other >= first) & (other <= last)
    elif LOWER:
        return other >= first
    else:
        return other <= last


@triton.jit
def softcap_score(score, scale, softcap):
    """log2(e) times the soft-capped score from q k^T, before ALiBi, and the cap's derivative. scale and softcap are already
    multiplied by log2(e): the hardware computes 2^x.
    """
    # tanh(x) = 2 sigmoid(2 x) - 1, correct at both infinities; libdevice.tanh fails in the interpreter. In scale / softcap no
    # log2(e) is left: sigmoid() multiplies by it.
    tanh = 2.0 * sigmoid(score * (2.0 * scale / softcap)) - 1.0
    return softcap * tanh, 1.0 - tanh * tanh
