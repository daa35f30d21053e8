"""Attention of one new token per row to a cache, in Triton. It is memory-bound: the cache should be read once.

The slots of a row are split over several programs ("flash-decoding", Dao et al. 2023), each of which keeps an online
softmax over its share; a second kernel merges the shares. The slots that the row may see at this position are split, not
the capacity: all programs stay busy while the cache fills, and no other slot is read.

The caches may be pages of PAGE slots each: the table `pages` names those of a row.

A head_dim that is no power of two is padded to one in registers; the padding is masked, hence not read. So are slots
that a row may not see. (Two tiles, 160 = 128 + 32, were compiled: their layouts differ, and each step of the loop then
waits at barriers that bring the scores of the two together.)
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.launch import cdiv, jit, next_power_of_2
from llmtrain.kernels.platform import Platform

# Untuned; for AMD compiled only. tile: elements of a tile of keys in two bytes each. stages: tiles in flight, through
# shared memory; left to itself (1), ptxas loads 16 bytes per thread, waits, and computes before it loads more.
_ONE_HEAD = {
    "nvidia": {"tile": 4096, "num_stages": 3, "num_warps": 4},
    "amd": {"tile": 4096, "num_stages": 1, "num_warps": 4},
}
_GROUPED = {
    "nvidia": {"tile": 8192, "num_stages": 3, "num_warps": 4},
    "amd": {"tile": 8192, "num_stages": 2, "num_warps": 4, "matrix_instr_nonkdim": 16},
}
_MERGE_COLUMNS = 64
_PROGRAMS_PER_SM = 32  # several rounds of what fits at once: the last, partial round then costs little
_MIN_SLOTS, _MAX_SPLITS = 64, 64


def build(spec: AttentionSpec, platform: Platform, variant: str) -> TritonAttentionStep:
    return TritonAttentionStep(spec, platform)


class TritonAttentionStep:
    """The signature of ReferenceAttentionStep. The caches are contiguous; q may have strides but for its last dim, pages between
    its rows."""

    def __init__(self, spec: AttentionSpec, platform: Platform):
        self.spec, self.slopes, self.num_sms = spec, Slopes(spec), platform.num_sms
        vendor = "amd" if platform.vendor == "amd" else "nvidia"
        self.group = spec.n_heads // spec.n_kv_heads
        self.options = dict((_ONE_HEAD if self.group == 1 else _GROUPED)[vendor])
        self.num_stages, tile = self.options.pop("num_stages"), self.options.pop("tile")
        # Triton counts the table's load in the distance of those of keys and values: as many tiles in flight as without.
        self.paged_stages = self.num_stages + 2 * (vendor == "nvidia" and self.group > 1)
        if spec.dtype == "float32":
            tile //= 2
            if self.group > 1:
                self.options["num_warps"] *= 2  # otherwise the three products of tf32x3 spill registers at head_dim 256

        # tl.dot wants at least 16 of everything.
        self.columns = max(16, next_power_of_2(spec.head_dim))
        self.slots = max(8 if self.group == 1 else 16, tile // self.columns)
        # Query heads of one program. Beyond 32 the sums take too many registers: more programs, served by the cache.
        self.heads = min(32, max(16, next_power_of_2(self.group)))
        self.precision = "tf32x3" if vendor == "nvidia" else "ieee"  # of fp32 products: fp32's accuracy in both

    def splits(self, batch: int, capacity: int) -> int:
        """Programs that share one head's slots. Fixed by shapes alone."""
        wanted = cdiv(_PROGRAMS_PER_SM * self.num_sms, batch * self.spec.n_kv_heads)
        return min(wanted, cdiv(capacity, _MIN_SLOTS), _MAX_SPLITS)

    def __call__(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        position: Tensor,
        first: Tensor,
        sinks: Tensor | None = None,
        pages: Tensor | None = None,
    ) -> Tensor:
        spec = self.spec
        batch, slots = q.shape[0], k_cache.shape[2]
        capacity = slots if pages is None else slots * pages.shape[1]
        assert q.shape == (batch, spec.n_heads, spec.head_dim) and q.stride(2) == 1
        assert k_cache.shape == v_cache.shape == (k_cache.shape[0], spec.n_kv_heads, slots, spec.head_dim)
        assert k_cache.shape[0] == batch if pages is None else pages.shape[0] == batch and pages.stride(1) == 1
        assert k_cache.is_contiguous() and v_cache.is_contiguous() and first.is_contiguous()
        assert k_cache.dtype == v_cache.dtype == q.dtype
        assert capacity * spec.head_dim < 1 << 31, "offsets inside a head are 32 bits wide"

        splits = self.splits(batch, capacity)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        # The result of a single split is final.
        parts, weights = out, None
        if splits > 1:
            parts = torch.empty(batch, spec.n_heads, splits, spec.head_dim, dtype=torch.float32, device=q.device)
            weights = torch.empty(batch, spec.n_heads, splits, dtype=torch.float32, device=q.device)
        sinks = None if sinks is None else sinks.float()
        inputs = (q, k_cache, v_cache, position, first, pages, self.slopes.on(q.device), sinks, parts, weights)
        between = capacity if pages is None else pages.stride(0)
        sizes = (q.stride(0), q.stride(1), between, spec.scale, spec.softcap)
        fixed = {
            "PAGE": None if pages is None else slots,
            "WINDOW": spec.sliding_window,
            "N_HEADS": spec.n_heads,
            "HEAD_DIM": spec.head_dim,
            "COLUMNS": self.columns,
            "SLOTS": self.slots,
            "SPLITS": splits,
            "NUM_STAGES": self.num_stages if pages is None else self.paged_stages,
        }
        if self.group == 1:
            _one_head[batch * spec.n_heads, splits](*inputs, *sizes, **fixed, **self.options)
        else:
            tiles = cdiv(self.group, self.heads)
            _grouped[batch * spec.n_kv_heads * tiles, splits](
                *inputs, *sizes, **fixed, GROUP=self.group, HEADS=self.heads, PRECISION=self.precision, **self.options
            )
        if splits > 1:
            padded = next_power_of_2(splits)
            grid = (batch * spec.n_heads, cdiv(spec.head_dim, _MERGE_COLUMNS))
            _merge[grid](parts, weights, out, spec.head_dim, splits, padded, _MERGE_COLUMNS, num_warps=4)
        return out


@triton.jit
def _one_head(
    q, k_cache, v_cache, position, first, pages, slopes, sinks, parts, weights, q_row, q_head, between, scale, softcap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """One query head, one share of its own keys and values. Program (row * n_heads + head, split).

    Every lane (slot modulo SLOTS) keeps a softmax of its own, merged at the end: inside the loop the only reduction
    is that over head_dim, which needs no other warp.
    """
    row_head, split = tl.program_id(0), tl.program_id(1)
    row, head = row_head // N_HEADS, row_head % N_HEADS
    newest = tl.load(position).to(tl.int32)
    begin, end = _share(newest, tl.load(first + row), split, WINDOW, SPLITS, SLOTS)

    column = tl.arange(0, COLUMNS)
    q_in = tl.load(q + row * q_row + head * q_head + column, mask=column < HEAD_DIM, other=0.0).to(tl.float32)
    acc = tl.zeros((SLOTS, COLUMNS), tl.float32)
    slope = 0.0 if slopes is None else tl.load(slopes + head)
    own = row_head.to(tl.int64) * between * HEAD_DIM if PAGE is None else head * PAGE * HEAD_DIM
    k_cache += own
    v_cache += own
    # Below every score, and finite: -inf - -inf would be NaN.
    row_max = tl.full((SLOTS,), -1e38, tl.float32)
    row_sum = tl.zeros((SLOTS,), tl.float32)
    if sinks is not None:  # in one lane of one split
        here = (tl.arange(0, SLOTS) == 0) & (split == 0)
        row_max = tl.where(here, tl.load(sinks + head) * 1.4426950408889634, row_max)
        row_sum = tl.where(here, 1.0, row_sum)

    for start in tl.range(begin, end, SLOTS, num_stages=NUM_STAGES):
        slots = start + tl.arange(0, SLOTS)
        valid = slots < end
        places = _offsets(pages, row * between, slots, valid, N_HEADS, PAGE, HEAD_DIM)
        k = _tile(k_cache, places, column, valid, HEAD_DIM, COLUMNS)
        v = _tile(v_cache, places, column, valid, HEAD_DIM, COLUMNS)
        score = tl.sum(q_in[None, :] * k.to(tl.float32), 1)
        score = tl.where(valid, _change(score, scale, softcap, slopes, slope, newest - slots), float("-inf"))
        new_max = tl.maximum(row_max, score)
        rescale, weight = tl.exp2(row_max - new_max), tl.exp2(score - new_max)
        row_max = new_max
        row_sum = row_sum * rescale + weight
        acc = acc * rescale[:, None] + weight[:, None] * v.to(tl.float32)

    highest = tl.max(row_max, 0)
    weight = tl.exp2(row_max - highest)
    row_sum = tl.sum(row_sum * weight, 0)
    mean = tl.sum(acc * weight[:, None], 0) / tl.where(row_sum > 0, row_sum, 1.0)
    at = row_head.to(tl.int64) * SPLITS + split
    tl.store(parts + at * HEAD_DIM + column, mean.to(parts.dtype.element_ty), mask=column < HEAD_DIM)
    if SPLITS > 1:
        tl.store(weights + at, highest + tl.log2(row_sum))


@jit
def _grouped(
    q, k_cache, v_cache, position, first, pages, slopes, sinks, parts, weights, q_row, q_head, between, scale, softcap,
    PAGE: tl.constexpr, WINDOW: tl.constexpr, N_HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr,
    SLOTS: tl.constexpr, SPLITS: tl.constexpr, NUM_STAGES: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The query heads that share a key head (HEADS of them at a time), one share of its keys and values.

    Program ((row * n_kv_heads + kv_head) * tiles + tile of heads, split). The group is padded to HEADS >= 16, what a
    matrix instruction takes; that it idles on the padding costs nothing, the memory is the bottleneck.
    """
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    row_kv, split = tl.program_id(0) // TILES, tl.program_id(1)
    row, kv_head = row_kv // (N_HEADS // GROUP), row_kv % (N_HEADS // GROUP)
    member = tl.program_id(0) % TILES * HEADS + tl.arange(0, HEADS)
    exists = member < GROUP
    heads = kv_head * GROUP + member
    newest = tl.load(position).to(tl.int32)
    begin, end = _share(newest, tl.load(first + row), split, WINDOW, SPLITS, SLOTS)

    column = tl.arange(0, COLUMNS)
    stored = exists[:, None] & (column < HEAD_DIM)[None, :]
    q_in = tl.load(q + row * q_row + heads[:, None] * q_head + column[None, :], mask=stored, other=0.0)
    acc = tl.zeros((HEADS, COLUMNS), tl.float32)
    slope = 0.0 if slopes is None else tl.load(slopes + heads, mask=exists, other=0.0)[:, None]
    own = row_kv.to(tl.int64) * between * HEAD_DIM if PAGE is None else kv_head * PAGE * HEAD_DIM
    k_cache += own
    v_cache += own
    row_max = tl.full((HEADS,), -1e38, tl.float32)
    row_sum = tl.zeros((HEADS,), tl.float32)
    if sinks is not None:
        row_max = tl.where(split == 0, tl.load(sinks + heads, mask=exists, other=0.0) * 1.4426950408889634, row_max)
        row_sum = tl.where(split == 0, 1.0, row_sum)

    for start in tl.range(begin, end, SLOTS, num_stages=NUM_STAGES):
        slots = start + tl.arange(0, SLOTS)
        valid = slots < end
        places = _offsets(pages, row * between, slots, valid, N_HEADS // GROUP, PAGE, HEAD_DIM)
        k = _tile(k_cache, places, column, valid, HEAD_DIM, COLUMNS)
        v = _tile(v_cache, places, column, valid, HEAD_DIM, COLUMNS)
        score = tl.dot(q_in, tl.trans(k), input_precision=PRECISION)
        score = _change(score, scale, softcap, slopes, slope, (newest - slots)[None, :])
        score = tl.where(valid[None, :], score, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(score, 1))
        rescale, weight = tl.exp2(row_max - new_max), tl.exp2(score - new_max[:, None])
        row_max = new_max
        row_sum = row_sum * rescale + tl.sum(weight, 1)
        acc = tl.dot(weight.to(v.dtype), v, acc * rescale[:, None], input_precision=PRECISION)

    mean = acc / tl.where(row_sum > 0, row_sum, 1.0)[:, None]
    at = (row * N_HEADS + heads).to(tl.int64) * SPLITS + split
    tl.store(parts + at[:, None] * HEAD_DIM + column[None, :], mean.to(parts.dtype.element_ty), mask=stored)
    if SPLITS > 1:
        tl.store(weights + at, row_max + tl.log2(row_sum), mask=exists)


@triton.jit
def _merge(
    parts, weights, out, HEAD_DIM: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Merge the shares: out = their mean, weighted by 2^weights. Program (row * n_heads + head, columns).

    parts: [batch, n_heads, SPLITS, head_dim]; weights: [batch, n_heads, SPLITS], log2 of the sum of a share's
    exponentials, -inf where the share is empty.
    """
    split = tl.arange(0, PADDED)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row_head = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row_head * SPLITS + split, mask=split < SPLITS, other=float("-inf"))
    mask = (split < SPLITS)[:, None] & (column < HEAD_DIM)[None, :]
    part = tl.load(parts + (row_head * SPLITS + split)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    weight = tl.exp2(weight - tl.maximum(tl.max(weight, 0), -1e38))
    row_sum = tl.sum(weight, 0)
    merged = tl.sum(part * weight[:, None], 0) / tl.where(row_sum > 0, row_sum, 1.0)
    tl.store(out + row_head * HEAD_DIM + column, merged.to(out.dtype.element_ty), mask=column < HEAD_DIM)


@triton.jit
def _share(newest, first, split, WINDOW: tl.constexpr, SPLITS: tl.constexpr, SLOTS: tl.constexpr):
    """[begin, end): the slots of one split among those that the row may see; empty when begin >= end."""
    first = first.to(tl.int32)
    if WINDOW is not None:
        first = tl.maximum(first, newest - WINDOW + 1)
    each = tl.cdiv(tl.maximum(newest + 1 - first, 0), SPLITS * SLOTS) * SLOTS
    begin = first + split * each
    return begin, tl.minimum(begin + each, newest + 1)


@triton.jit
def _offsets(
    pages, row, slots, valid, KV_HEADS: tl.constexpr, PAGE: tl.constexpr, HEAD_DIM: tl.constexpr
):  # fmt: skip
    """Offsets of the keys of slots from the head in the row's cache, or in page 0. row: where its pages begin in the table."""
    if PAGE is not None:
        page = tl.load(pages + row + slots // PAGE, mask=valid, other=0).to(tl.int64)
        slots = page * (KV_HEADS * PAGE) + slots % PAGE
    return slots * HEAD_DIM


@triton.jit
def _tile(cache, offsets, columns, valid, HEAD_DIM: tl.constexpr, COLUMNS: tl.constexpr):
    """[slots, columns] of one head's cache; zeros, not read, where a slot is not valid."""
    mask = valid[:, None]
    if COLUMNS > HEAD_DIM:
        mask = mask & (columns < HEAD_DIM)[None, :]
    return tl.load(cache + offsets[:, None] + columns[None, :], mask=mask, other=0.0)


@triton.jit
def _change(score, scale, softcap, slopes, slope, distance):
    """log2(e) times the score from q k^T: the hardware computes 2^x."""
    score = score * scale
    if softcap is not None:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), right at both infinities; libdevice.tanh fails in the interpreter.
        score = softcap * (1.0 - 2.0 / (tl.exp2(score * (2.0 * 1.4426950408889634 / softcap)) + 1.0))
    if slopes is not None:
        score = score - slope * distance
    return score * 1.4426950408889634
