"""Tuning of the gated norm: forward and backward, each on its own."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from llmtrain.bench.tune.memory_bound import Draw, MemoryBound, Outputs
from llmtrain.kernels.gated_norm import triton_kernels as kernels
from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec, refuse_triton_rows
from llmtrain.kernels.gated_norm.triton import default_launch
from llmtrain.kernels.gated_norm.triton_launch import Tile
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import fitted, narrowed


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

    def refusal(self) -> str | None:
        """Reason why no search can serve the case on any GPU, or None."""
        return refuse_triton_rows(self.spec, None)


class Problem(MemoryBound):
    operation, parts, launch = "gated_norm", ("forward", "backward"), Tile

    def __init__(self, case: Case, device: str, where: Platform):
        super().__init__(case, where)
        self.spec = case.spec
        self.table = default_launch(self.spec, where)
        draw, size = Draw(device, case.dtype), (case.tokens, self.spec.dim)
        self.x, self.z, self.dy, self.weight = draw(*size), draw.slice(*size), draw(*size), draw(self.spec.dim)
        self.r = torch.empty((case.tokens, case.groups), device=device)
        if device != "meta":
            value = self.x.float() if case.norm_first else self.x.float() * F.silu(self.z.float())
            mean = value.square().unflatten(-1, (case.groups, -1)).mean(-1)
            self.r = torch.rsqrt(mean + self.spec.eps)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 2 to 16 numbers of a part and up to 48 of a row, backward 40, and 28 that stay in
        registers.

        Programs per multiprocessor: a multiple of the number that can run there at once (1 to 3, forward 4 or 6), so that no
        wave is half empty. `long`: as many tiles as that allows.
        """
        yield getattr(self.table, part)
        lanes, size = 64 if self.where.vendor == "amd" else 32, self.case.group_size
        forward, long = part == "forward", 512
        for columns, num_warps in itertools.product((512, 1024, 2048, 8192), (1, 2, 4, 8, 16)):
            held, parts = columns // (lanes * num_warps), -(-size // columns)
            row = parts * held
            if held not in (2, 4, 8, 16) or columns >= 2 * size or row > (48 if forward else 40):
                continue
            if size >= 1024 and (4 * columns * parts > 5 * size or (quick and (columns < 1024 or held > 8))):
                continue
            if forward:
                yield Tile(columns, num_warps, 1)
            programs = (12, 24) if forward else (2, 6)
            for per_sm, how in itertools.product(programs, self._fetched(forward, quick)):
                if row > 28 and not how.get("reload", True):
                    continue
                if not (forward and how and per_sm == 24):  # prefetching pays in few, long programs
                    yield Tile(columns, num_warps, long, programs_per_sm=per_sm, **how)
        if size <= 256:  # narrow groups: how many rows at once
            for rows, num_warps, run in itertools.product((4, 8, 16, 32), (2, 4, 8), (8, 16, 32)):
                columns = 1 << (size - 1).bit_length()
                if columns * rows // (lanes * num_warps) in (4, 8, 16):
                    yield Tile(columns, num_warps, run, rows)

    def _fetched(self, forward: bool, quick: bool) -> list[dict[str, Any]]:
        """Ways to read a row: if tiles are prefetched through shared memory, a second read goes through it as well."""
        reloaded: list[dict[str, Any]] = [{}, {"prefetch": True}]
        through = [{"num_stages": num_stages} for num_stages in ((3,) if quick and not forward else (2, 3))]
        if forward:
            return [*reloaded, *through]
        # Held in registers, a row leaves room for few programs, which must fetch ahead.
        kept = [{"prefetch": True}, *through] if quick else [*reloaded, *through]
        return [*reloaded, *({**how, "reload": False} for how in kept)]

    def _fitted(self, tile: Tile) -> Tile:
        return fitted(narrowed(tile, self.case.group_size), self.table.num_sms, self.case.tokens, self.case.groups)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        spec = self.spec
        tile = self._fitted(launch or getattr(self.table, part))
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
