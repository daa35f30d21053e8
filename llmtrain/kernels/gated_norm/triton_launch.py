"""Launch parameters of the gated norm's kernels, per architecture and size of a group. Not tuned yet."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict, dataclass, replace

from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform


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


def _rows(lanes: int, programs: int) -> list[tuple[int, Launch]]:
    """(size of a group up to, launch), first match. A thread holds 16 bytes of a part, in two-byte numbers."""
    return [
        (size, Launch(Tile(columns, columns // (8 * lanes), 8), Tile(columns, columns // (8 * lanes), 32), programs))
        for size, columns in ((6144, 1024), (8192, 2048))
    ]


LAUNCHES: dict[str, list[tuple[int, Launch]]] = {
    "sm80": _rows(32, 108 * 4),  # compiled only
    "sm90": _rows(32, 132 * 4),  # compiled only; the next to be measured
    "gfx90a": _rows(64, 104 * 4),  # compiled only
    "gfx942": _rows(64, 304 * 4),  # compiled only
}


def default_launch(spec: GatedNormSpec, platform: Platform) -> Launch:
    """Of this architecture, or of the nearest that is in the table; the most threads for numbers twice as wide."""
    rows = LAUNCHES.get(platform.arch) or LAUNCHES["gfx942" if platform.vendor == "amd" else "sm80"]
    launch = next(launch for largest, launch in rows if spec.group_size <= largest)
    if spec.dtype == "float32":
        launch = rows[-1][1]
    forward, backward = (_narrowed(tile, spec.group_size) for tile in (launch.forward, launch.backward))
    return Launch(forward, backward, launch.programs)


def _narrowed(tile: Tile, size: int) -> Tile:
    """No wider than a group; what is free then takes more rows."""
    while tile.columns >= 2 * size and tile.columns > 16:
        tile = replace(tile, columns=tile.columns // 2, rows=tile.rows * 2)
    return tile


def fitted(tile: Tile, programs: int, rows: int, n_groups: int) -> Tile:
    """The same with shorter runs, where programs would be too few."""
    while tile.run > 1 and -(-rows // (tile.rows * tile.run)) * n_groups < programs:
        tile = replace(tile, run=tile.run // 2)
    return tile
