"""Tuning space of the residual norm: forward and backward of x + delta, each on its own."""

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from llmtrain.kernels.norm import triton_kernels as kernels
from llmtrain.kernels.norm.triton import default_launch
from llmtrain.kernels.operation import run_both, wide
from llmtrain.kernels.row_tiles import Tile, fitted, narrowed
from llmtrain.kernels.search import Outputs, Search, lanes


class NormSearch(Search):
    launch = Tile

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.table, self.centred = default_launch(self.spec, self.where), self.spec.type == "layernorm"
        x, delta, self.weight, self.bias = self.tensors
        # Rows, as the kernels take them.
        self.x, self.delta, self.d_total, self.dy = (
            None if t is None else t.flatten(0, 1) for t in (x, delta, *self.up)
        )
        self.statistics = torch.empty((1 + self.centred, len(self.x)), device=self.device)
        if self.device != "meta":  # of x, which the backward is given as what was normed
            self.statistics = _statistics(self.x.float(), self.centred, self.spec.eps)

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        """Candidates in which a thread holds 4 to 16 numbers of a part and up to 32 of a row, as do the sums of the backward.

        `max_tiles` without bound stays so in the row: it is `fitted` to the tokens at every launch, here too.
        """
        yield getattr(self.table, part)
        threads, size, forward = lanes(self.where), self.spec.dim, part == "forward"
        for columns, num_warps in itertools.product((512, 1024, 2048, 4096), (1, 2, 4, 8, 16)):
            held, parts = columns // (threads * num_warps), -(-size // columns)
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
        return fitted(narrowed(tile, self.spec.dim), self.table.num_sms, len(self.x))

    def run(self, part: str, launch: Tile | None) -> Outputs:
        tile = self._fitted(launch or getattr(self.table, part))
        if part == "forward":
            total, y, statistics = kernels.forward(
                self.x, self.delta, self.weight, self.bias, self.centred, self.spec.eps, tile
            )
            return (y, statistics) if total is None else (y, statistics, total)
        residual = None if self.delta is None else self.d_total
        how = (self.x, self.weight, self.statistics, self.spec.bias, tile)
        dx, partials = kernels.backward(self.dy, residual, *how)
        d_weight, d_bias = kernels.parameter_gradients(partials, self.weight, self.spec.bias)
        return (dx, d_weight) if d_bias is None else (dx, d_weight, d_bias)

    def in_float64(self) -> dict[str, Any]:
        norm, summed = self.operation.reference(self.shape, self.device), self.delta is not None
        total, y = (t.detach() for t in norm(*wide((self.x, self.delta, self.weight, self.bias))))
        forward = (y, _statistics(total, self.centred, self.spec.eps))
        up = (self.d_total.double() * summed, self.dy.double())
        # The backward is given the sum as x.
        gradients = run_both(norm, wide((self.x, None, self.weight, self.bias)), up)[2:]
        return {"forward": (*forward, total) if summed else forward, "backward": gradients}


def _statistics(x: Tensor, centred: bool, eps: float) -> Tensor:
    """Statistics as the kernels keep them: see triton_kernels.py."""
    mean = x.mean(-1, keepdim=True) * centred
    r = torch.rsqrt((x - mean).square().mean(-1) + eps)
    return torch.stack((r, mean[:, 0])) if centred else r[None]
