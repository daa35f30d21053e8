"""Tuning space of Kimi Delta Attention's rule: tiles of each kernel, timed in the whole of its direction, then the best of all."""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from typing import Any

import torch

from llmtrain.kernels.kimi_delta import triton
from llmtrain.kernels.kimi_delta.triton_launch import Launch, Tile
from llmtrain.kernels.options import decode
from llmtrain.kernels.search import Attempt, Outputs, Search, Winner

SPACE: dict[str, tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "chunk_decays": ((32, 64, 128), (16,), (2, 4, 8), (1,)),
    "pair_products": ((16, 32, 64), (16,), (1, 2), (1, 2, 3)),
    "chunk_transform": ((16,), (16,), (1, 2, 4), (1,)),
    "state_passing": ((128,), (16, 32, 64), (4, 8), (1, 2, 3)),
    "chunk_outputs": ((32, 64), (64, 128), (4,), (1, 2, 3)),
    "state_passing_bwd": ((128,), (16, 32, 64), (4, 8), (1, 2)),
    "pair_gradients": ((16,), (32, 64, 128), (4,), (1, 2, 3)),
    "chunk_gradients": ((16, 32, 64), (32, 64, 128), (1, 2, 4), (1, 2, 3)),
}
"""Channels of keys and of values, warps and stages of each kernel's programs; 16 where it takes none by blocks."""
FORWARD = ("chunk_decays", "pair_products", "chunk_transform", "state_passing", "chunk_outputs")


class KimiDeltaSearch(Search):
    """A part is a kernel; `whole` and `every`: a Launch, forward and backward."""

    parts, launch, unit = tuple(SPACE), Tile, "tflops"
    by_pieces = True

    def __init__(self, *given: Any):
        super().__init__(*given)
        self.table, ids, state = triton.default_launch(self.spec, self.where), None, None
        if dict(self.shape.options).get("packed", False):
            ids = torch.zeros(self.up.shape[:2], dtype=torch.int32, device=self.device)
            sizes = (self.up.shape[0], self.spec.n_heads, self.spec.key_head_dim, self.spec.value_head_dim)
            state = torch.zeros(sizes, device=self.device)
        self.given, self.d_final = (*self.tensors, state, ids), state
        self._kept: tuple[torch.Tensor, ...] = ()

    def launches(self, part: str, quick: bool) -> Iterator[Tile]:
        own = getattr(self.table, part)
        yield own
        for keys, values, warps, stages in itertools.product(*SPACE[part]):
            if stages == 1 or not (quick or self.where.vendor == "amd"):
                yield Tile(keys, values, warps, stages)

    def run(self, part: str, launch: Tile | None) -> Outputs:
        return self._run(part, self.table if launch is None else replace(self.table, **{part: launch}))

    def _run(self, part: str, launch: Launch) -> Outputs:
        settings = (launch.chunk_size, launch.dump())
        if part in FORWARD:
            return triton.launch_forward(*self.given, *settings)[:1]
        if part in SPACE:
            if not self._kept:
                _, _, *kept = triton.launch_forward(*self.given, self.table.chunk_size, self.table.dump())
                self._kept = tuple(kept)
            return triton.launch_backward(self.up, self.d_final, *self.given, *self._kept, *settings)[:5]
        y, _, *kept = triton.launch_forward(*self.given, *settings)
        return (y, *triton.launch_backward(self.up, self.d_final, *self.given, *kept, *settings)[:5])

    def runner(self, part: str, launch: dict[str, Any] | None) -> Callable[[], Any]:
        if part in SPACE:
            return super().runner(part, launch)
        made = self.table if launch is None else decode(Launch, launch, "launch")
        return lambda: self._run(part, made)

    def in_float64(self) -> dict[str, Any]:
        y, *gradients = self.operation.exact(self.shape, self.tensors, self.up)
        return {part: (y,) if part in FORWARD else gradients for part in SPACE} | {"whole": (y, *gradients)}

    def work(self, part: str) -> float:
        forward, backward = (work.flops for work in self.operation.work(self.shape))
        return forward + backward if part not in SPACE else forward if part in FORWARD else backward

    def winners(self, best: dict[str, list[Attempt]], measurer: Callable[[str, dict[str, Any]], Any]) -> list[Winner]:
        """The fastest tile of every kernel, all together."""
        tiles = {part: Tile(**attempts[0].launch) for part, attempts in best.items() if attempts}
        launch = replace(self.table, **tiles)
        measured = measurer("whole", asdict(launch))
        shared = max((attempts[0].shared for attempts in best.values() if attempts), default=0)
        won = Winner("kimi_delta", launch, measured.ms, shared, self.work("whole"), self.unit)
        return [won] if measured.problem is None else []
