"""Launch parameters of the gated delta rule's kernels, which follow from the size of a head and the vendor. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.options import Count, Options
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Tile(Options):
    """block_keys, block_values: channels of a head that a program takes at a time; kernels that pass states take all keys."""

    block_keys: Count
    block_values: Count
    num_warps: Count
    num_stages: Count


@dataclass(frozen=True)
class Launch(Options):
    """chunk_size: a power of two of at least 16. solve_precision: of the triangular systems' products, for inputs of 16 bits."""

    chunk_wy: Tile
    state_passing: Tile
    chunk_scores: Tile
    written_bwd: Tile
    state_passing_bwd: Tile
    chunk_scores_bwd: Tile
    chunk_wy_bwd: Tile
    chunk_size: Count = 64
    solve_precision: str = "ieee"


def launch_for(spec: GatedDeltaSpec, platform: Platform) -> Launch:
    """Tiles that compile without spills at up to 256 channels of keys, and fit every GPU's shared memory. Not tuned by a
    measurement: see docs/kernels-log.md."""
    wide = spec.key_head_dim > 128
    stages = 2 if platform.vendor == "nvidia" else 1
    small, large = Tile(32, 32, 4, stages), Tile(64, 64, 4, stages)
    return Launch(
        chunk_wy=small,
        state_passing=Tile(256, 16, 8 if wide else 4, 1),
        chunk_scores=large,
        written_bwd=large,
        state_passing_bwd=Tile(256, 16, 8 if wide else 4, 1),
        chunk_scores_bwd=small,
        chunk_wy_bwd=Tile(32, 32, 8, stages),
        solve_precision="tf32x3" if platform.vendor == "nvidia" else "ieee",
    )
