"""Launch parameters of the gated delta rule's kernels. No torch here."""

from dataclasses import dataclass

from llmtrain.kernels.options import Count, Options, Warps


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
