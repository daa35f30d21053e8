"""Launch parameters of the gated delta rule's kernels, which follow from the size of a head and the vendor. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.gated_delta.spec import GatedDeltaSpec
from llmtrain.kernels.options import Count, Options, Warps
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Tile(Options):
    """block_keys, block_values: channels of a head that a program takes at a time. Kernels that pass states take all keys, in
    two halves if they are more than a block."""

    block_keys: Count
    block_values: Count
    num_warps: Warps
    num_stages: Count


@dataclass(frozen=True)
class Launch(Options):
    """chunk_size: a power of two of at least 16. solve_precision: of the triangular systems' products, for inputs of 16 bits."""

    chunk_transform: Tile
    state_passing: Tile
    chunk_outputs: Tile
    state_passing_bwd: Tile
    chunk_gradients: Tile
    chunk_size: Count = 64
    solve_precision: str = "ieee"


def launch_for(spec: GatedDeltaSpec, platform: Platform) -> Launch:
    """Tiles for the platform: for 128 and 256 channels on Hopper the fastest of twelve sets, measured on an H200 (BENCHMARKS.md);
    else such as compile without spills at up to 256 channels of keys, and fit every GPU's shared memory."""
    wide, nvidia = spec.key_head_dim > 128, platform.vendor == "nvidia"
    if platform.arch == "sm90" and spec.key_head_dim % 128 == 0 and spec.value_head_dim % 128 == 0:
        return Launch(
            chunk_transform=Tile(32, 32, 1, 4),
            state_passing=Tile(128, 32, 4, 2 if wide else 3),
            chunk_outputs=Tile(32, 128, 4, 4),
            state_passing_bwd=Tile(128, 32, 4, 1) if wide else Tile(64, 32, 4, 2),
            chunk_gradients=Tile(64, 16, 4, 3),
            solve_precision="tf32x3",
        )
    stages = 2 if nvidia else 1
    passing = Tile(64, 16, 8 if wide else 4, stages)
    return Launch(
        chunk_transform=Tile(16, 16, 1, 1) if nvidia else Tile(32, 32, 1, 1),
        state_passing=passing,
        chunk_outputs=Tile(64, 64, 4, stages),
        state_passing_bwd=passing,
        chunk_gradients=Tile(128, 32, 8, stages) if spec.key_head_dim > 64 else Tile(32, 32, 4, stages),
        solve_precision="tf32x3" if nvidia else "ieee",
    )
