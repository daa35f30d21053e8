"""Tuning space of the gated norm: forward and backward, each on its own."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F

from llmtrain.kernels.gated_norm import triton_kernels as kernels
from llmtrain.kernels.gated_norm.triton import default_launch
from llmtrain.kernels.gated_norm.triton_launch import Tile
from llmtrain.kernels.operation import run_both, wide
from llmtrain.kernels.row_tiles import fitted, narrowed
from llmtrain.kernels.search import Outputs, Search, lanes


class GatedNormSearch(Search):
    launch = Tile

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.table = default_launch(self.spec, self.where)
        # Rows, as the kernels take them.
        self.x, self.z, self.dy = (t.flatten(0, 1) for t in (*self.tensors[:2], self.up))
        self.weight, groups = self.tensors[2], self.spec.n_groups
        self.r = torch.empty((len(self.x), groups), device=self.device)
        if self.device != "meta":
            value = self.x.float() if self.spec.norm_before_gate else self.x.float() * F.silu(self.z.float())
            self.r = torch.rsqrt(value.square().unflatten(-1, (groups, -1)).mean(-1) + self.spec.eps)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 2 to 16 numbers of a part and up to 48 of a row, backward 40, and 28 that stay in
        registers.

        Programs per multiprocessor: a multiple of the number that can run there at once (1 to 3, forward 4 or 6), so that no
        wave is half empty. `long`: as many tiles as that allows.
        """
        yield getattr(self.table, part)
        threads, size = lanes(self.where), self.spec.group_size
        forward, long = part == "forward", 512
        for columns, num_warps in itertools.product((512, 1024, 2048, 8192), (1, 2, 4, 8, 16)):
            held, parts = columns // (threads * num_warps), -(-size // columns)
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
                if columns * rows // (threads * num_warps) in (4, 8, 16):
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
        return fitted(narrowed(tile, self.spec.group_size), self.table.num_sms, len(self.x), self.spec.n_groups)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        spec = self.spec
        tile = self._fitted(launch or getattr(self.table, part))
        if part == "forward":
            return kernels.forward(self.x, self.z, self.weight, spec.n_groups, spec.eps, spec.norm_before_gate, tile)
        how = (spec.norm_before_gate, tile)
        dx, dz, partials = kernels.backward(self.dy, self.x, self.z, self.weight, self.r, *how)
        return dx, dz, kernels.parameter_gradient(partials, self.weight)

    def in_float64(self) -> dict[str, Any]:
        reference = self.operation.reference(self.shape, self.device)
        y, *gradients = run_both(reference, wide((self.x, self.z, self.weight)), self.dy.double())
        return {"forward": (y, self.r), "backward": gradients}
