"""Attention of packed texts that begin alike: what they share stands in the sequence once.

A segment is a run of tokens. It continues other segments (a question, before it a few-shot prompt), which stand earlier in
the sequence, and its tokens see those and themselves. For each depth of the tree, the keys that a token sees there are one
interval, as in packed documents; so attention runs once per depth, on the kernels for documents, and the parts are joined by
their log-sum-exps. Between a segment and what it continues there are other segments: ALiBi's distances there are too long
by a number that is the same for all keys of a part, so only its log-sum-exp needs to know.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels import registry
from llmtrain.kernels.attention.documents import Documents
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.attention.step import Slopes
from llmtrain.kernels.platform import Platform


@dataclass
class Tree:
    """places: [1, T], of each token in its own text. parts: what tokens see in their own segment, then at each depth.

    apart: per part, how many tokens too far its keys seem to be, [T] in fp32; None for the first.
    """

    places: Tensor
    parts: list[Documents]
    apart: list[Tensor | None]
    _made: dict[Any, Any] = field(default_factory=dict)

    def once(self, key: Any, make: Callable[[], Any]) -> Any:
        """make(), or what it made for an earlier layer."""
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def to(self, device: torch.device) -> Tree:
        """In one copy, which waits for nothing on the device."""
        rows = [self.places[0], *(t[0] for part in self.parts for t in (part.starts, part.ends))]
        rows += [t.to(torch.int32) for t in self.apart if t is not None]
        moved = moved_to(torch.stack(rows), device)
        depth = len(self.parts)
        bounds, apart = moved[1 : 1 + 2 * depth, None], moved[1 + 2 * depth :].to(torch.float32)
        parts = [Documents(bounds[2 * i], bounds[2 * i + 1]) for i in range(depth)]
        return Tree(moved[:1], parts, [None, *apart])


def moved_to(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy from pageable memory would wait for what the GPU is doing."""
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def tree(lengths: Sequence[int], above: Sequence[Sequence[int]]) -> Tree:
    """On the CPU. lengths: tokens of each segment, in order; above: which earlier segments it continues, the outermost first.

    At each depth, segments that continue the same one must follow each other, and in its order.
    """
    size = torch.tensor(lengths, dtype=torch.int32)
    end = size.cumsum(0, dtype=torch.int32)
    start = end - size
    offset = torch.tensor([sum(lengths[i] for i in chain) for chain in above], dtype=torch.int32)
    inside = torch.arange(int(end[-1]), dtype=torch.int32)

    def spread(of_segments: Tensor) -> Tensor:
        return of_segments.repeat_interleave(size)

    places = inside - spread(start - offset)
    parts = [Documents(spread(start)[None], spread(end - 1)[None])]
    apart: list[Tensor | None] = [None]
    for depth in range(max(map(len, above), default=0)):
        seen = torch.tensor([chain[depth] if depth < len(chain) else -1 for chain in above])
        # A segment that continues none at this depth sees nothing, between what was seen before and what comes.
        first, last = torch.where(seen < 0, 0, start[seen]), torch.where(seen < 0, -1, end[seen] - 1)
        last = last.cummax(0).values
        first = torch.where(seen < 0, last + 1, first)
        far = torch.where(seen < 0, 0, (start - offset) - (start - offset)[seen])
        parts.append(Documents(spread(first)[None], spread(last)[None]))
        apart.append(spread(far).to(torch.float32))
    return Tree(places[None], parts, apart)


@functools.cache
def _slopes(spec: AttentionSpec) -> Slopes:
    """For good: to make them anew would wait for the GPU."""
    return Slopes(spec)


def refusal(spec: AttentionSpec, platform: Platform) -> str | None:
    """Why trees cannot be read here, or None."""
    if spec.sliding_window is not None:
        return "a sliding window ends by distances, which parts of a tree do not have"
    return registry.refusal("attention", "triton", spec, platform)


def attend_tree(q: Tensor, k: Tensor, v: Tensor, spec: AttentionSpec, tree: Tree) -> Tensor:
    """q: [1, T, n_heads, head_dim]; k, v: [1, T, n_kv_heads, head_dim] -> like q. No gradients."""
    from llmtrain.kernels.attention.triton import attend

    slopes = _slopes(spec).on(q.device)
    out, total = attend(q, k, v, spec.scale, softcap=spec.softcap, slopes=slopes, packed=tree.parts[0])
    for part, apart in zip(tree.parts[1:], tree.apart[1:], strict=True):
        more, lse = attend(q, k, v, spec.scale, softcap=spec.softcap, slopes=slopes, packed=part)
        if slopes is not None and apart is not None:
            lse = lse + slopes[:, None] * apart
        share = torch.sigmoid(lse - total).transpose(1, 2)[..., None]  # 0 where nothing is seen: the lse is -inf
        out = torch.lerp(out, more, share.to(out.dtype))
        total = torch.logaddexp(total, lse)
    return out
