"""Launch parameters of Kimi Delta Attention's kernels. No torch here."""

from dataclasses import dataclass, field

from llmtrain.kernels.gated_delta import triton_launch as gated_delta
from llmtrain.kernels.gated_delta.triton_launch import Tile
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.platform import Platform


@dataclass(frozen=True)
class Launch(gated_delta.Launch):
    """Programs that pass states take all keys, whatever block_keys is; those of chunk_transform a whole chunk."""

    chunk_decays: Tile = field(kw_only=True)
    pair_products: Tile = field(kw_only=True)
    pair_gradients: Tile = field(kw_only=True)


def launch_for(spec: KimiDeltaSpec, platform: Platform) -> Launch:
    """Tiles for the platform."""
    nvidia = platform.vendor == "nvidia"
    stages = 2 if nvidia else 1
    return Launch(
        chunk_decays=Tile(32, 32, 4, 1),
        pair_products=Tile(64, 64, 2, 1),
        chunk_transform=Tile(64, 64, 2, 1),
        state_passing=Tile(128, 32, 4, stages),
        chunk_outputs=Tile(64, 64, 4, stages),
        state_passing_bwd=Tile(128, 32, 4, 1),
        pair_gradients=Tile(64, 64, 4, stages),
        chunk_gradients=Tile(32, 64, 2, 1),
        solve_precision="tf32x3" if nvidia else "ieee",
    )
