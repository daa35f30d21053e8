"""Tuning of the gated norm: forward and backward, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from llmtrain.bench.tune.memory_bound import TOLERANCE, Draw, MemoryBound, Outputs
from llmtrain.kernels.gated_norm import triton_kernels as kernels
from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.gated_norm.triton_launch import Tile, default_launch, fitted, narrowed
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Case:
    group_size: int = 5120
    groups: int = 1
    norm_first: bool = False
    dtype: str = "bfloat16"
    tokens: int = 16384

    @property
    def spec(self) -> GatedNormSpec:
        return GatedNormSpec(self.group_size * self.groups, self.groups, 1e-5, bool(self.norm_first), self.dtype)


class Problem(MemoryBound):
    operation, parts, launch = "gated_norm", ("forward", "backward"), Tile

    def __init__(self, case: Case, device: str, where: Platform):
        self.case, self.where, self.spec = case, where, case.spec
        self.shape = {"group_size": case.group_size}
        self.tolerance = TOLERANCE[case.dtype]
        self.table = default_launch(self.spec, where)
        draw, size = Draw(device, case.dtype), (case.tokens, self.spec.dim)
        self.x, self.z, self.dy, self.weight = draw(*size), draw.slice(*size), draw(*size), draw(self.spec.dim)
        self.r = torch.empty((case.tokens, case.groups), device=device)
        if device != "meta":
            value = self.x.float() if case.norm_first else self.x.float() * F.silu(self.z.float())
            mean = value.square().unflatten(-1, (case.groups, -1)).mean(-1)
            self.r = torch.rsqrt(mean + self.spec.eps)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """A thread holds 4 to 16 numbers of a part."""
        yield self._fitted(getattr(self.table, part))
        lanes = 64 if self.where.vendor == "amd" else 32
        runs = (8, 16) if quick else (1, 4, 8, 16, 32) if part == "forward" else (8, 16, 32, 64)
        for columns, warps, run in itertools.product((512, 1024, 2048, 8192), (1, 2, 4, 8, 16), runs):
            if columns // (lanes * warps) in (4, 8, 16) and columns < 2 * self.case.group_size:
                yield self._fitted(Tile(columns, warps, run))
                if columns == 1024 and run in (8, 16) and not quick:
                    yield self._fitted(Tile(columns, warps, run, stages=2))
        if self.case.group_size <= 256:  # narrow groups: how many rows at once
            for rows, warps, run in itertools.product((4, 8, 16, 32), (2, 4, 8), runs[:3]):
                columns = 1 << (self.case.group_size - 1).bit_length()
                if columns * rows // (lanes * warps) in (4, 8, 16):
                    yield self._fitted(Tile(columns, warps, run, rows))

    def _fitted(self, tile: Tile) -> Tile:
        return fitted(narrowed(tile, self.case.group_size), self.table.programs, self.case.tokens, self.case.groups)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        spec = self.spec
        wanted = self._fitted(getattr(self.table, part)) if launch is None else launch
        tile = narrowed(wanted, self.case.group_size)
        if part == "forward":
            return kernels.forward(self.x, self.z, self.weight, spec.n_groups, spec.eps, spec.norm_before_gate, tile)
        how = (spec.norm_before_gate, tile)
        dx, dz, partials = kernels.backward(self.dy, self.x, self.z, self.weight, self.r, *how)
        return dx, dz, kernels.parameter_gradient(partials, self.weight)

    def in_float64(self) -> dict[str, Outputs]:
        leaves = [t.detach().double().requires_grad_() for t in (self.x, self.z, self.weight)]
        y = ReferenceGatedNorm(self.spec)(*leaves)
        return {"forward": (y.detach(), self.r), "backward": torch.autograd.grad(y, leaves, self.dy.double())}

    def bytes(self, part: str) -> int:
        """x, z and y; dy, x, z, dx and dz."""
        return (3 if part == "forward" else 5) * self.dy.numel() * self.dy.element_size()
