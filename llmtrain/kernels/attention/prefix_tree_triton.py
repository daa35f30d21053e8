"""Attention over a prefix tree in Triton: queries see the keys of an ancestor, and the result is merged with that so far.

Only for the tiles of queries that have an ancestor at a depth of the tree: the answers to a question, not the question.
The loop is the forward kernel's; the two log-sum-exps are the weights of the two results. No gradients.
"""

import functools

import triton.language as tl
from torch import Tensor

from llmtrain.kernels.attention.prefix_tree import BLOCK_QUERIES, PrefixTree
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.attention.triton import attend
from llmtrain.kernels.attention.triton_forward import attend_tile
from llmtrain.kernels.attention.triton_tiles import LOG2_E, LOWEST, load_rows, parts_of, store_rows, tile_ranges, zeros
from llmtrain.kernels.launch import jit

_LOG2_E = 1.4426950408889634


@functools.cache
def _slopes(spec: AttentionSpec) -> Slopes:
    """Made once: a copy from the host would wait for the GPU."""
    return Slopes(spec)


def prefix_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None, *, spec: AttentionSpec, vendor: str, tree: PrefixTree
) -> Tensor:
    """q: [1, T, n_heads, head_dim]; k, v: [1, T, n_kv_heads, head_dim]; sinks: [n_heads] -> like q. No gradients."""
    slopes = _slopes(spec).on(q.device)
    # The sinks enter once, beside the keys of a token's own segment.
    out, lse = attend(q, k, v, spec.scale, softcap=spec.softcap, slopes=slopes, packed=tree.segments, sinks=sinks)
    for depth in tree.depths:
        merge_ancestors(
            q, k, v, out, lse, spec, slopes, depth.starts, depth.ends, depth.distance_offset, depth.tiles, vendor
        )
    return out


def merge_ancestors(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, spec: AttentionSpec, slopes: Tensor | None,
    starts: Tensor, ends: Tensor, distance_offset: Tensor, tiles: Tensor, vendor: str,
) -> None:  # fmt: skip
    """Merge into `out` and `lse`, the results so far, those of the keys starts .. ends of each query.

    q: [1, T, n_heads, head_dim]; k: [1, T, n_kv_heads, head_dim]; v: [1, T, n_kv_heads, width]; out: [1, T, n_heads, width],
    contiguous; lse: [1, n_heads, T]; slopes: [n_heads] in fp32;
    starts, ends, distance_offset: [T] in int32, see Depth; tiles: the tiles of queries that see anything.
    """
    seq_len, n_heads, head_dim = q.shape[1:]
    assert out.is_contiguous() and lse.is_contiguous() and q.stride(3) == k.stride(3) == v.stride(3) == 1
    two_bytes = q.element_size() == 2
    options = {"num_warps": 4, "num_stages": 2 if vendor == "nvidia" else 1}
    if vendor == "amd":
        options["matrix_instr_nonkdim"] = 16
    _merge_ancestors[(tiles.shape[0] * n_heads,)](
        q, k, v, out, lse, slopes, starts, ends, distance_offset, tiles,
        q.stride(1), q.stride(2), k.stride(1), k.stride(2), v.stride(1), v.stride(2),
        seq_len, spec.scale * _LOG2_E, None if spec.softcap is None else spec.softcap * _LOG2_E,
        N_HEADS=n_heads, GROUP=n_heads // k.shape[2], HEAD_DIM=head_dim, PARTS=parts_of(head_dim),
        VALUE_DIM=v.shape[3], VALUE_PARTS=parts_of(v.shape[3]),
        BLOCK_M=BLOCK_QUERIES, BLOCK_N=32 if two_bytes and head_dim <= 128 else 16, NUM_STAGES=options["num_stages"],
        PRECISION="tf32x3" if vendor == "nvidia" else "ieee", **options,
    )  # fmt: skip


@jit
def _merge_ancestors(
    q, k, v, out, lse, slopes, starts, ends, distance_offset, tiles,
    q_token, q_head, k_token, k_head, v_token, v_head, seq_len, scale, softcap,
    N_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, PARTS: tl.constexpr,
    VALUE_DIM: tl.constexpr, VALUE_PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0)
    head = at % N_HEADS
    begin = tl.load(tiles + at // N_HEADS) * BLOCK_M
    i = begin + tl.arange(0, BLOCK_M)
    inside = i < seq_len
    q += head * q_head
    k += head // GROUP * k_head
    v += head // GROUP * v_head
    slope = 0.0 if slopes is None else tl.load(slopes + head) * LOG2_E

    q_tile = load_rows(q, 0, 0, begin, seq_len, q_token, BLOCK_M, HEAD_DIM, PARTS, True, False)
    first = tl.load(starts + i, mask=inside, other=0)
    last = tl.load(ends + i, mask=inside, other=-1)
    a, _, _, end = tile_ranges(begin, starts, ends, seq_len, BLOCK_M, BLOCK_N, None, None)
    acc = zeros(BLOCK_M, VALUE_PARTS)
    row_max = tl.full((BLOCK_M,), LOWEST, tl.float32)
    row_sum = tl.zeros((BLOCK_M,), tl.float32)
    for start in tl.range(a, end, BLOCK_N, num_stages=NUM_STAGES):
        acc, row_max, row_sum = attend_tile(
            acc, row_max, row_sum, q_tile, k, v, k_token, v_token, 0, 0, start, seq_len, i, begin, first, last,
            scale, softcap, slopes, slope, True, True, True, True, True,
            BLOCK_N, HEAD_DIM, PARTS, VALUE_DIM, VALUE_PARTS, False, PRECISION,
        )  # fmt: skip

    if slopes is not None:  # as in attention_forward; and the distances to these keys are too long
        row_max -= slope * (i - begin - tl.load(distance_offset + i, mask=inside, other=0))
    found = row_max + tl.log2(row_sum)  # -inf where nothing is seen
    lse += head * seq_len
    before = tl.load(lse + i, mask=inside, other=0.0) * LOG2_E
    highest = tl.maximum(found, before)
    new, old = tl.exp2(found - highest), tl.exp2(before - highest)
    tl.store(lse + i, (highest + tl.log2(new + old)) / LOG2_E, mask=inside)
    scaled = new / ((new + old) * tl.where(row_sum > 0, row_sum, 1.0))
    kept = old / (new + old)
    out += head * VALUE_DIM
    earlier = load_rows(out, 0, 0, begin, seq_len, N_HEADS * VALUE_DIM, BLOCK_M, VALUE_DIM, VALUE_PARTS, True, False)
    joined = ()
    for part in tl.static_range(len(VALUE_PARTS)):
        joined = joined + (acc[part] * scaled[:, None] + earlier[part].to(tl.float32) * kept[:, None],)
    store_rows(out, joined, 1.0, begin, seq_len, N_HEADS * VALUE_DIM, BLOCK_M, VALUE_DIM, VALUE_PARTS)
