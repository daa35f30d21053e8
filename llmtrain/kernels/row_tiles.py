"""Launch parameters of kernels that hold whole rows of a matrix in registers: what norms do. No torch here."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from llmtrain.kernels.options import Count, Flag, Options, Power, Warps


@dataclass(frozen=True)
class Tile(Options):
    """block_columns: columns of one part of a row, a power of two; all parts of a row are in registers at once.

    max_tiles: tiles that a program loops over, at most, with the weights, and their gradients, in registers.
    block_rows: rows of a tile, a power of two; more than one for rows narrower than `block_columns`.
    num_stages: tiles prefetched through shared memory; 1: none. prefetch: the next tile is loaded into registers early.
    programs_per_sm: programs per multiprocessor, at least, where there are tokens enough. As many as run there at once, and
        `max_tiles` without bound: each gets an equal share, and there are few partial sums.
    """

    block_columns: Power
    num_warps: Warps
    max_tiles: Count
    block_rows: Power = 1
    num_stages: Count = 1
    prefetch: Flag = False
    programs_per_sm: Count = 6

    def refusal(self, kernel: str, arch: str, shape: Mapping[str, int]) -> str | None:
        return "prefetch is for norm.backward alone" if self.prefetch and kernel == "norm.forward" else None


@dataclass(frozen=True)
class Launch(Options):
    """num_sms: multiprocessors of the GPU; None: `max_tiles` stays as it is."""

    forward: Tile
    backward: Tile
    num_sms: Count | None


_AnyTile = TypeVar("_AnyTile", bound=Tile)


def narrowed(tile: _AnyTile, size: int) -> _AnyTile:
    """The same tile, no wider than a row; more rows take the columns that become free."""
    while tile.block_columns >= 2 * size and tile.block_columns > 16:
        tile = replace(tile, block_columns=tile.block_columns // 2, block_rows=tile.block_rows * 2)
    return tile


@functools.lru_cache(1024)
def fitted(tile: _AnyTile, num_sms: int | None, rows: int, n_groups: int = 1) -> _AnyTile:
    """The same tile with `max_tiles` so small that as many programs share the rows as it asks for."""
    share = -(-rows * n_groups // (tile.block_rows * tile.programs_per_sm * num_sms)) if num_sms else tile.max_tiles
    return replace(tile, max_tiles=max(1, min(tile.max_tiles, share)))
