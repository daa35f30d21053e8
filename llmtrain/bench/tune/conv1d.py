"""Tuning of the convolution with SiLU: forward and backward, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from llmtrain.bench.tune.memory_bound import Draw, MemoryBound, Outputs
from llmtrain.kernels.conv1d import triton_kernels as kernels
from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.conv1d.spec import Conv1dSpec, refuse_triton_sequence
from llmtrain.kernels.conv1d.triton import default_launch
from llmtrain.kernels.conv1d.triton_launch import Tile, fitted, narrowed
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Case:
    """tokens: in all sequences together. packed: with documents."""

    channels: int = 5376
    width: int = 4
    seq_len: int = 4096
    dtype: str = "bfloat16"
    tokens: int = 16384
    packed: bool = False
    document: int = 700
    """Tokens of one."""

    @property
    def spec(self) -> Conv1dSpec:
        return Conv1dSpec(self.channels, self.width, self.dtype)

    def refusal(self) -> str | None:
        """Reason why no search can serve the case on any GPU, or None."""
        return refuse_triton_sequence(self.spec, None)

    @property
    def batch(self) -> int:
        return max(1, self.tokens // self.seq_len)


class Problem(MemoryBound):
    operation, parts, launch = "conv1d", ("forward", "backward"), Tile

    def __init__(self, case: Case, device: str, where: Platform):
        super().__init__(case, where)
        self.table = default_launch(case.spec, where)
        draw, size = Draw(device, case.dtype), (case.batch, case.seq_len, case.channels)
        self.x, self.weight, self.bias = draw.slice(*size), draw(case.channels, case.width), draw(case.channels)
        self.dy = draw(*size)
        self.ids: Tensor | None = None
        if case.packed:
            numbers = torch.arange(case.seq_len, dtype=torch.int32, device=device) // case.document
            self.ids = numbers.expand(case.batch, -1).contiguous()

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 4 or 8 of a token's channels forward, and 2 to 8 backward, which needs about 30
        registers for each.
        """
        yield self._fitted(getattr(self.table, part))
        forward, lanes = part == "forward", 64 if self.where.vendor == "amd" else 32
        held = (4, 8) if forward else (2, 4) if quick else (2, 4, 8)
        widths = (128, 256, 512) if forward else (64, 128, 256)
        runs = ((64, 4), (32, 4), *(() if quick else ((128, 4), (64, 8), (48, 3), (96, 3))))
        prefetches: tuple[dict[str, Any], ...] = ({}, {"prefetch": True}, {"num_stages": 2})
        for channels, parallel_runs, num_warps in itertools.product(widths, (4,) if quick else (2, 4, 8), (2, 4, 8)):
            if channels * parallel_runs // (lanes * num_warps) not in held:
                continue
            for (run, group), how in itertools.product(runs, prefetches):
                if how and (parallel_runs != 4 or (run, group) not in runs[:2]):
                    continue
                if group >= self.case.width - 1 and (parallel_runs == 4 or (group == 4 and run in (32, 64))):
                    yield self._fitted(Tile(channels, parallel_runs, run, group, num_warps, **how))
            if forward and parallel_runs == 4 and channels * parallel_runs // (lanes * num_warps) == 4:
                yield self._fitted(Tile(channels, parallel_runs, 64, 8, num_warps, prefetch=True))

    def _fitted(self, tile: Tile) -> Tile:
        case = self.case
        tile = narrowed(tile, case.channels)
        return fitted(tile, self.table.min_programs, case.batch, case.seq_len, case.channels)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        tile = self._fitted(getattr(self.table, part)) if launch is None else narrowed(launch, self.case.channels)
        if part == "forward":
            return (kernels.forward(self.x, self.weight, self.bias, self.ids, tile),)
        dx, partials = kernels.backward(self.dy, self.x, self.weight, self.bias, self.ids, tile)
        return dx, *kernels.parameter_gradients(partials, self.weight, self.bias)

    def in_float64(self) -> dict[str, Outputs]:
        leaves = [t.detach().double().requires_grad_() for t in (self.x, self.weight, self.bias)]
        x, weight, bias = leaves
        pieces = x.split(self.case.document, 1) if self.case.packed else (x,)
        y = torch.cat([causal_conv1d_silu(piece, weight, bias) for piece in pieces], 1)
        return {"forward": (y.detach(),), "backward": torch.autograd.grad(y, leaves, self.dy.double())}

    def bytes(self, part: str) -> int:
        """x and y; dy, x and dx."""
        return (2 if part == "forward" else 3) * self.dy.numel() * self.dy.element_size()
