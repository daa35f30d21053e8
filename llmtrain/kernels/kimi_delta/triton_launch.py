"""Launch parameters of Kimi Delta Attention's kernels. No torch here."""

from llmtrain.kernels.gated_delta.triton_launch import Launch, Tile
from llmtrain.kernels.kimi_delta.spec import KimiDeltaSpec
from llmtrain.kernels.platform import Platform


def launch_for(spec: KimiDeltaSpec, platform: Platform) -> Launch:
    """Tiles for the platform; programs that pass states take all keys, whatever block_keys is."""
    nvidia = platform.vendor == "nvidia"
    stages = 2 if nvidia else 1
    return Launch(
        chunk_transform=Tile(32, 32, 4, 1),
        state_passing=Tile(128, 32, 4, stages),
        chunk_outputs=Tile(64, 64, 4, stages),
        state_passing_bwd=Tile(128, 32, 8, stages),
        chunk_gradients=Tile(32, 32, 8, stages),
        solve_precision="tf32x3" if nvidia else "ieee",
    )
