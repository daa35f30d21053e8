"""Launch parameters of the gated norm's kernels."""

from dataclasses import dataclass

from llmtrain.kernels import row_tiles
from llmtrain.kernels.options import Flag


@dataclass(frozen=True)
class Tile(row_tiles.Tile):
    """reload: the backward reads x and z a second time, from the L1 cache, rather than keeping what it computed of them."""

    reload: Flag = True


@dataclass(frozen=True)
class Launch(row_tiles.Launch):
    forward: Tile
    backward: Tile
