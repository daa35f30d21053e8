"""Prefix trees: packed requests that share prefixes, each of which is in the sequence once; and their attention.

A segment is a run of tokens. It continues other segments (a question, before it a few-shot prompt), which stand earlier in
the sequence, and its tokens see those and themselves. At each depth of the tree, the keys that a token sees there are one
interval, as in packed documents. So attention first runs on the segments, with the kernels for documents; then once per
depth, for the tokens that see something there, and the partial results are merged by their log-sum-exps
(prefix_tree_triton.py). Between a segment and its ancestors there are other segments: ALiBi's distances are too long by a
number that is the same for all keys of an ancestor, so a correction of that part's log-sum-exp is enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from llmtrain.kernels import registry
from llmtrain.kernels.async_copy import copy_async
from llmtrain.kernels.attention.documents import Documents
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.platform import Platform

BLOCK_QUERIES = 32
"""Queries per program of the kernel for one depth: few tokens continue something, and they are neighbours."""


@dataclass(frozen=True)
class Depth:
    """Keys that tokens see at one depth: starts .. ends, [T], whose distances are too long by `distance_offset` tokens. Empty
    intervals lie between the others. tiles: tiles of BLOCK_QUERIES tokens that see anything. All in int32.
    """

    starts: Tensor
    ends: Tensor
    distance_offset: Tensor
    tiles: Tensor


@dataclass
class PrefixTree:
    """lengths, ancestors: see build_prefix_tree. positions: [1, T], of each token in its own request. segments: as documents."""

    lengths: Sequence[int]
    ancestors: Sequence[Sequence[int]]
    positions: Tensor
    segments: Documents
    depths: list[Depth]
    _cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), or its result from an earlier layer."""
        if key not in self._cache:
            self._cache[key] = make()
        return self._cache[key]

    def to(self, device: torch.device) -> PrefixTree:
        segments = Documents(copy_async(self.segments.starts, device), copy_async(self.segments.ends, device))
        depths = [
            Depth(*(copy_async(t, device) for t in (one.starts, one.ends, one.distance_offset, one.tiles)))
            for one in self.depths
        ]
        return PrefixTree(self.lengths, self.ancestors, copy_async(self.positions, device), segments, depths)


def build_prefix_tree(lengths: Sequence[int], ancestors: Sequence[Sequence[int]]) -> PrefixTree:
    """A prefix tree, on the CPU. lengths: tokens of each segment, in order; ancestors: the earlier segments that it continues, the
    outermost first.

    At each depth, segments that continue the same one must follow each other, and in its order.
    """
    # numpy takes a tenth of torch's time for lists and for such small arrays.
    size = np.array(lengths, dtype=np.int32)
    end = size.cumsum(dtype=np.int32)
    start = end - size
    offset = np.array([sum(lengths[i] for i in chain) for chain in ancestors], dtype=np.int32)
    inside = np.arange(end[-1], dtype=np.int32)

    def spread(of_segments: np.ndarray) -> Tensor:
        return torch.from_numpy(np.repeat(of_segments.astype(np.int32), size))

    depths = []
    for depth in range(max(map(len, ancestors), default=0)):
        seen = np.array([chain[depth] if depth < len(chain) else -1 for chain in ancestors])
        nothing = seen < 0
        # A segment without an ancestor at this depth gets an empty interval, between those before and after it.
        last = np.maximum.accumulate(np.where(nothing, -1, end[seen] - 1))
        first = np.where(nothing, last + 1, start[seen])
        distance_offset = np.where(nothing, 0, (start - offset) - (start - offset)[seen])
        per_tile = np.bincount(inside[np.repeat(~nothing, size)] // BLOCK_QUERIES)
        tiles = torch.from_numpy(np.flatnonzero(per_tile).astype(np.int32))
        depths.append(Depth(spread(first), spread(last), spread(distance_offset), tiles))
    segments = Documents(spread(start)[None], spread(end - 1)[None])
    positions = torch.from_numpy(inside) - spread(start - offset)
    return PrefixTree(lengths, ancestors, positions[None], segments, depths)


def refusal(spec: AttentionSpec, platform: Platform) -> str | None:
    """Reason for which prefix trees cannot be read here, or None."""
    if spec.sliding_window is not None:
        return "a sliding window needs distances, which are not exact between segments of a prefix tree"
    return registry.refusal("attention", "triton", spec, platform)
