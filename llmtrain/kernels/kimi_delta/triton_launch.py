"""Launch parameters of Kimi Delta Attention's kernels. No torch here."""

from dataclasses import dataclass, field

from llmtrain.kernels.gated_delta import triton_launch as gated_delta
from llmtrain.kernels.gated_delta.triton_launch import Tile


@dataclass(frozen=True)
class Launch(gated_delta.Launch):
    """Programs that pass states take all keys, whatever block_keys is; those of chunk_transform a whole chunk."""

    chunk_decays: Tile = field(kw_only=True)
    pair_products: Tile = field(kw_only=True)
    pair_gradients: Tile = field(kw_only=True)
