"""Launch parameters of the gated norm's kernels."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.kernels import row_tiles
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Tile(row_tiles.Tile):
    """again: whether the backward reads x and z a second time, from the L1 cache, rather than keeping what it made of them."""

    reload: bool = True


@dataclass(frozen=True)
class Launch(row_tiles.Launch):
    forward: Tile
    backward: Tile


def default_launch(spec: GatedNormSpec, platform: Platform) -> Launch:
    return Launch.of_table("gated_norm", spec.dtype, {"group_size": spec.group_size}, platform)
