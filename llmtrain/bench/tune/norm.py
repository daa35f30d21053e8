"""Tuning of the residual norm: forward and backward of x + delta, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.memory_bound import Draw, MemoryBound, Outputs
from llmtrain.kernels.norm import triton_kernels as kernels
from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.norm.spec import NormSpec, refuse_triton_rows
from llmtrain.kernels.norm.triton import default_launch
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import Tile, fitted, narrowed


@dataclass(frozen=True)
class Case:
    """centred: LayerNorm; summed: of x + delta, whose gradient joins."""

    dim: int = 2560
    centred: bool = False
    biased: bool = False
    summed: bool = True
    dtype: str = "bfloat16"
    tokens: int = 16384

    @property
    def spec(self) -> NormSpec:
        return NormSpec(self.dim, "layernorm" if self.centred else "rmsnorm", bool(self.biased), 1e-5, self.dtype)

    def refusal(self) -> str | None:
        """Reason why no search can serve the case on any GPU, or None."""
        return refuse_triton_rows(self.spec, None)


class Problem(MemoryBound):
    operation, parts, launch = "norm", ("forward", "backward"), Tile

    def __init__(self, case: Case, device: str, where: Platform):
        super().__init__(case, where)
        self.spec = case.spec
        self.table = default_launch(self.spec, where)
        draw, size = Draw(device, case.dtype), (case.tokens, case.dim)
        self.x, self.delta, self.dy, self.d_total = (draw(*size) for _ in range(4))
        self.weight, self.bias = draw(case.dim), draw(case.dim)
        self.statistics = torch.empty((1 + case.centred, case.tokens), device=device)
        if device != "meta":  # of x, which the backward is given as what was normed
            self.statistics = _statistics(self.x.float(), bool(case.centred), self.spec.eps)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 4 to 16 numbers of a part and up to 32 of a row, as do the sums of the backward.

        `max_tiles` without bound stays so in the row: it is `fitted` to the tokens at every launch, here too.
        """
        yield getattr(self.table, part)
        lanes, size = 64 if self.where.vendor == "amd" else 32, self.case.dim
        forward = part == "forward"
        for columns, num_warps in itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8, 16)):
            held, parts = columns // (lanes * num_warps), -(-size // columns)
            if held not in (4, 8, 16) or columns >= 2 * size or held * parts > 32:
                continue
            if forward:
                for run in (1,) if quick else (1, 2, 4):
                    yield Tile(columns, num_warps, run)
                continue
            fetched: list[dict[str, Any]] = [{"prefetch": True}, {"num_stages": 3}]
            for how, programs in itertools.product(fetched if quick else [{}, *fetched], (2,) if quick else (1, 2, 4)):
                yield Tile(columns, num_warps, 512, programs_per_sm=programs, **how)

    def _fitted(self, tile: Tile) -> Tile:
        return fitted(narrowed(tile, self.case.dim), self.table.num_sms, self.case.tokens)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        case, spec = self.case, self.spec
        tile = self._fitted(launch or getattr(self.table, part))
        if part == "forward":
            how = (self.weight, self.bias if case.biased else None, bool(case.centred), spec.eps, tile)
            total, y, statistics = kernels.forward(self.x, self.delta if case.summed else None, *how)
            return (y, statistics) if total is None else (y, statistics, total)
        residual = self.d_total if case.summed else None
        how = (self.x, self.weight, self.statistics, bool(case.biased), tile)
        dx, partials = kernels.backward(self.dy, residual, *how)
        d_weight, d_bias = kernels.parameter_gradients(partials, self.weight, bool(case.biased))
        return (dx, d_weight) if d_bias is None else (dx, d_weight, d_bias)

    def in_float64(self) -> dict[str, Outputs]:
        case, norm = self.case, ReferenceNorm(self.spec)
        weights = [self.weight, self.bias] if case.biased else [self.weight]
        leaves = [t.detach().double().requires_grad_() for t in (self.x, *weights)]
        delta = self.delta.double() if case.summed else None
        total, y = (t.detach() for t in norm(leaves[0], delta, *leaves[1:]))
        forward = (y, _statistics(total, bool(case.centred), self.spec.eps))
        outputs, up = norm(leaves[0], None, *leaves[1:]), (self.d_total.double() * bool(case.summed), self.dy.double())
        return {
            "forward": (*forward, total) if case.summed else forward,
            "backward": torch.autograd.grad(outputs, leaves, up),
        }

    def bytes(self, part: str) -> int:
        """Summed: x, delta, their sum and y; dy, the sum and its gradient, and dx."""
        return (4 if self.case.summed else 3 - (part == "forward")) * self.dy.numel() * self.dy.element_size()


def _statistics(x: Tensor, centred: bool, eps: float) -> Tensor:
    """Statistics as the kernels keep them: see triton_kernels.py."""
    mean = x.mean(-1, keepdim=True) * centred
    r = torch.rsqrt((x - mean).square().mean(-1) + eps)
    return torch.stack((r, mean[:, 0])) if centred else r[None]
