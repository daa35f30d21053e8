"""Launch parameters of the gated norm's kernels, from the tuning tables."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass

from llmtrain.kernels import row_tiles, tuning
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.row_tiles import narrowed


@dataclass(frozen=True)
class Tile(row_tiles.Tile):
    """again: whether the backward reads x and z a second time, from the L1 cache, rather than keeping what it made of them."""

    again: bool = True


@dataclass(frozen=True)
class Launch:
    """processors: of the GPU; 0: runs stay as they are."""

    forward: Tile
    backward: Tile
    processors: int

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    return Launch(Tile(**fields["forward"]), Tile(**fields["backward"]), fields["processors"])


def default_launch(spec: GatedNormSpec, platform: Platform) -> Launch:
    """What the tuning table says, no wider than a group."""
    rows = (
        tuning.select(f"gated_norm.{kernel}", spec.dtype, {"group_size": spec.group_size}, platform)
        for kernel in ("forward", "backward")
    )
    forward, backward = (narrowed(row.launch, spec.group_size) for row in rows)
    return Launch(forward, backward, platform.processors)
