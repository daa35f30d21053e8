"""Launch parameters of the gated norm's kernels, from the tuning tables."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace

from llmtrain.kernels import tuning
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Tile:
    """columns: of one part of a group, a power of two; as many parts as a group needs are in registers at once.

    run: tiles that a program goes through at most, with the weights, and their gradients, in registers.
    rows: of a tile, a power of two; more than one for groups narrower than `columns`.
    stages: tiles fetched ahead through shared memory; 1: none.
    ahead: whether the next tile is fetched into registers.
    again: whether the backward reads x and z a second time, from the L1 cache, rather than keeping what it made of them.
    programs: per processor, at least, where there are tokens enough. As many as run there at once, and `run` without
        bound: each gets an equal share, and there are few partial sums.
    """

    columns: int
    warps: int
    run: int
    rows: int = 1
    stages: int = 1
    ahead: bool = False
    again: bool = True
    programs: int = 6


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


def narrowed(tile: Tile, group_size: int) -> Tile:
    """No wider than a group; what is free then takes more rows."""
    while tile.columns >= 2 * group_size and tile.columns > 16:
        tile = replace(tile, columns=tile.columns // 2, rows=tile.rows * 2)
    return tile


def fitted(tile: Tile, processors: int, rows: int, n_groups: int) -> Tile:
    """The same with runs so short that tiles are shared by as many programs as it wants."""
    share = -(-rows * n_groups // (tile.rows * tile.programs * processors)) if processors else tile.run
    return replace(tile, run=max(1, min(tile.run, share)))
