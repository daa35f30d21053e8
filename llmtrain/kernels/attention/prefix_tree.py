"""Attention of packed texts that begin alike: what they share stands in the sequence once.

A segment is a run of tokens. It continues other segments (a question, before it a few-shot prompt), which stand earlier in
the sequence, and its tokens see those and themselves. For each depth of the tree, the keys that a token sees there are one
interval, as in packed documents. So attention first runs on the segments, with the kernels for documents; then once per
depth, for the tokens that see something there, and the parts are joined by their log-sum-exps (tree_triton.py). Between a
segment and what it continues there are other segments: ALiBi's distances there are too long by a number that is the same for
all keys of a part, so only its log-sum-exp needs to know.
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
"""Queries of a program that looks at one depth: few are what continues something, and they stand together."""


@dataclass(frozen=True)
class Depth:
    """What tokens see at one depth: keys starts .. ends, [T], which seem to be `apart` tokens too far; empty intervals lie
    between the others. tiles: those of TILE tokens that see anything. All in int32.
    """

    starts: Tensor
    ends: Tensor
    distance_offset: Tensor
    tiles: Tensor


@dataclass
class PrefixTree:
    """lengths, above: as of `tree`. places: [1, T], of each token in its own text. own: what it sees in its own segment."""

    lengths: Sequence[int]
    ancestors: Sequence[Sequence[int]]
    positions: Tensor
    segments: Documents
    depths: list[Depth]
    _cache: dict[Any, Any] = field(default_factory=dict)

    def cached(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), or what it made for an earlier layer."""
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
    """On the CPU. lengths: tokens of each segment, in order; above: which earlier segments it continues, the outermost first.

    At each depth, segments that continue the same one must follow each other, and in its order.
    """
    # In numpy, which takes a tenth of torch's time for lists and for such small arrays.
    size = np.array(lengths, dtype=np.int32)
    end = size.cumsum(dtype=np.int32)
    start = end - size
    offset = np.array([sum(lengths[i] for i in chain) for chain in ancestors], dtype=np.int32)
    inside = np.arange(end[-1], dtype=np.int32)

    def spread(of_segments: np.ndarray) -> Tensor:
        return torch.from_numpy(np.repeat(of_segments.astype(np.int32), size))

    depths = []
    for depth in range(max(map(len, ancestors), default=0)):
        in_range = np.array([chain[depth] if depth < len(chain) else -1 for chain in ancestors])
        nothing = in_range < 0
        # A segment that continues none at this depth sees nothing, between what was seen before and what comes.
        last = np.maximum.accumulate(np.where(nothing, -1, end[in_range] - 1))
        first = np.where(nothing, last + 1, start[in_range])
        distance_offset = np.where(nothing, 0, (start - offset) - (start - offset)[in_range])
        per_tile = np.bincount(inside[np.repeat(~nothing, size)] // BLOCK_QUERIES)
        tiles = torch.from_numpy(np.flatnonzero(per_tile).astype(np.int32))
        depths.append(Depth(spread(first), spread(last), spread(distance_offset), tiles))
    segments = Documents(spread(start)[None], spread(end - 1)[None])
    positions = torch.from_numpy(inside) - spread(start - offset)
    return PrefixTree(lengths, ancestors, positions[None], segments, depths)


def refusal(spec: AttentionSpec, platform: Platform) -> str | None:
    """Why trees cannot be read here, or None."""
    if spec.sliding_window is not None:
        return "a sliding window ends by distances, which parts of a tree do not have"
    return registry.refusal("attention", "triton", spec, platform)
