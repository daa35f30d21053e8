"""How a kernel goes through the rows of a matrix, each in registers as a whole: what norms do. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Self, TypeVar

from llmtrain.kernels import tuning
from llmtrain.kernels.options import Options
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Tile:
    """columns: of one part of a row, a power of two; as many parts as a row needs are in registers at once.

    run: tiles that a program goes through at most, with the weights, and their gradients, in registers.
    rows: of a tile, a power of two; more than one for rows narrower than `columns`.
    stages: tiles fetched ahead through shared memory; 1: none.
    ahead: whether the next tile is fetched into registers.
    programs: per processor, at least, where there are tokens enough. As many as run there at once, and `run` without
        bound: each gets an equal share, and there are few partial sums.
    """

    block_columns: int
    num_warps: int
    max_tiles: int
    block_rows: int = 1
    num_stages: int = 1
    prefetch: bool = False
    programs_per_sm: int = 6


@dataclass(frozen=True)
class Launch(Options):
    """processors: of the GPU; None: runs stay as they are."""

    forward: Tile
    backward: Tile
    num_sms: int | None

    @classmethod
    def of_table(cls, operation: str, dtype: str, shape: Mapping[str, int], platform: Platform) -> Self:
        """What the tuning table says, no wider than a row. shape: its size, by the table's name for it."""
        (size,) = shape.values()
        rows = (tuning.select(f"{operation}.{kernel}", dtype, shape, platform) for kernel in ("forward", "backward"))
        forward, backward = (narrowed(row.launch, size) for row in rows)
        return cls(forward, backward, platform.num_sms)


_AnyTile = TypeVar("_AnyTile", bound=Tile)


def narrowed(tile: _AnyTile, size: int) -> _AnyTile:
    """No wider than a row; what is free then takes more rows."""
    while tile.block_columns >= 2 * size and tile.block_columns > 16:
        tile = replace(tile, block_columns=tile.block_columns // 2, block_rows=tile.block_rows * 2)
    return tile


def fitted(tile: _AnyTile, num_sms: int | None, rows: int, n_groups: int = 1) -> _AnyTile:
    """The same with runs so short that tiles are shared by as many programs as it wants."""
    share = -(-rows * n_groups // (tile.block_rows * tile.programs_per_sm * num_sms)) if num_sms else tile.max_tiles
    return replace(tile, max_tiles=max(1, min(tile.max_tiles, share)))
