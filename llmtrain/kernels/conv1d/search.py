"""Tuning space of the convolution with SiLU: forward and backward, each on its own."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from llmtrain.kernels.conv1d import triton_kernels as kernels
from llmtrain.kernels.conv1d.reference import causal_conv1d_silu
from llmtrain.kernels.conv1d.triton import default_launch
from llmtrain.kernels.conv1d.triton_launch import Tile, fitted, narrowed
from llmtrain.kernels.operation import run_both, wide
from llmtrain.kernels.search import Outputs, Search, lanes


class Conv1dSearch(Search):
    launch = Tile

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.table = default_launch(self.spec, self.where)
        self.x, self.weight, self.bias = self.tensors
        self.ids = self.operation.ids(self.shape, self.device)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 4 or 8 of a token's channels forward, and 2 to 8 backward, which needs about 30
        registers for each.
        """
        yield self._fitted(getattr(self.table, part))
        forward, threads = part == "forward", lanes(self.where)
        held = (4, 8) if forward else (2, 4) if quick else (2, 4, 8)
        widths = (128, 256, 512) if forward else (64, 128, 256)
        runs = ((64, 4), (32, 4), *(() if quick else ((128, 4), (64, 8), (48, 3), (96, 3))))
        prefetches: tuple[dict[str, Any], ...] = ({}, {"prefetch": True}, {"num_stages": 2})
        for channels, parallel_runs, num_warps in itertools.product(widths, (4,) if quick else (2, 4, 8), (2, 4, 8)):
            if channels * parallel_runs // (threads * num_warps) not in held:
                continue
            for (run, group), how in itertools.product(runs, prefetches):
                if how and (parallel_runs != 4 or (run, group) not in runs[:2]):
                    continue
                if group >= self.spec.width - 1 and (parallel_runs == 4 or (group == 4 and run in (32, 64))):
                    yield self._fitted(Tile(channels, parallel_runs, run, group, num_warps, **how))
            if forward and parallel_runs == 4 and channels * parallel_runs // (threads * num_warps) == 4:
                yield self._fitted(Tile(channels, parallel_runs, 64, 8, num_warps, prefetch=True))

    def _fitted(self, tile: Tile) -> Tile:
        shape, channels = self.shape, self.spec.channels
        return fitted(narrowed(tile, channels), self.table.min_programs, shape.batch, shape.seq_len, channels)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        tile = self._fitted(getattr(self.table, part)) if launch is None else narrowed(launch, self.spec.channels)
        if part == "forward":
            return (kernels.forward(self.x, self.weight, self.bias, self.ids, tile),)
        dx, partials = kernels.backward(self.up, self.x, self.weight, self.bias, self.ids, tile)
        return dx, *kernels.parameter_gradients(partials, self.weight, self.bias)

    def in_float64(self) -> dict[str, Any]:
        """Document by document."""
        length = dict(self.shape.options).get("document", self.shape.seq_len)

        def apart(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            pieces = x.split(length, 1) if self.ids is not None else (x,)
            return torch.cat([causal_conv1d_silu(piece, weight, bias) for piece in pieces], 1)

        y, *gradients = run_both(apart, wide((self.x, self.weight, self.bias)), self.up.double())
        return {"forward": (y,), "backward": gradients}
