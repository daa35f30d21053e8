"""Launch parameters of the gated norm's kernels, from the tuning tables."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace

from llmtrain.kernels import tuning
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform

PROGRAMS = 4  # per processor, at least, where there are tokens enough


@dataclass(frozen=True)
class Tile:
    """columns: of one part of a group, a power of two; as many parts as a group needs are in registers at once.

    run: tiles that a program goes through, with the weights, and their gradients, in registers.
    rows: of a tile, a power of two; more than one for groups narrower than `columns`.
    stages: tiles fetched ahead through shared memory; 1: none.
    """

    columns: int
    warps: int
    run: int
    rows: int = 1
    stages: int = 1


@dataclass(frozen=True)
class Launch:
    """programs: as many as keep the GPU busy; runs are halved until there are so many."""

    forward: Tile
    backward: Tile
    programs: int

    def dump(self) -> str:
        """As an operator takes it: the compiled graph then says how its kernels run, on any rank."""
        return json.dumps(asdict(self), sort_keys=True)


@functools.cache
def parsed(dumped: str) -> Launch:
    fields = json.loads(dumped)
    return Launch(Tile(**fields["forward"]), Tile(**fields["backward"]), fields["programs"])


def default_launch(spec: GatedNormSpec, platform: Platform) -> Launch:
    """What the tuning table says, no wider than a group."""
    rows = (
        tuning.select(f"gated_norm.{kernel}", spec.dtype, {"group_size": spec.group_size}, platform)
        for kernel in ("forward", "backward")
    )
    forward, backward = (narrowed(row.launch, spec.group_size) for row in rows)
    return Launch(forward, backward, PROGRAMS * platform.processors)


def narrowed(tile: Tile, group_size: int) -> Tile:
    """No wider than a group; what is free then takes more rows."""
    while tile.columns >= 2 * group_size and tile.columns > 16:
        tile = replace(tile, columns=tile.columns // 2, rows=tile.rows * 2)
    return tile


def fitted(tile: Tile, programs: int, rows: int, n_groups: int) -> Tile:
    """The same with shorter runs, where programs would be too few."""
    while tile.run > 1 and -(-rows // (tile.rows * tile.run)) * n_groups < programs:
        tile = replace(tile, run=tile.run // 2)
    return tile
