"""SmolLM3 (Hugging Face, 2025) as transformers' SmolLM3ForCausalLM: Llama without positions in every fourth layer
(arXiv:2501.18795)."""

from typing import Any

from transformers import SmolLM3Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import SLIDING, Refusals

_UNROTATED = "+nope"


class SmolLM3(Decoder):
    """A layer's type, as in layer_types, has a mark where it has no positions. Not read, because no_rope_layers says it:
    no_rope_layer_interval."""

    kind = SmolLM3Config
    has_layer_types = True
    positions = ("rotary", "none")

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        windows = SLIDING in config.layer_types
        instead = "the class masks by layer_types, but its layers have a window by this; make them agree"
        refusals.unless(bool(config.use_sliding_window) or not windows, "use_sliding_window", False, instead)
        types, rotated = super().layer_types(config, refusals), config.no_rope_layers
        enough = len(rotated) >= len(types)
        refusals.unless(enough, "no_rope_layers", rotated, f"there are {len(types)} layers; give a number for each")
        refusals.check()
        return [kind + _UNROTATED * (not one) for kind, one in zip(types, rotated, strict=False)]

    def block_names(self, types: list[str]) -> dict[str, str]:
        plain = super().block_names([kind.removesuffix(_UNROTATED) for kind in types])
        return {kind: plain[kind.removesuffix(_UNROTATED)] + "_nope" * kind.endswith(_UNROTATED) for kind in types}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type.removesuffix(_UNROTATED), refusals)
        return block | {"position": {"type": "none"}} if layer_type.endswith(_UNROTATED) else block

    def write_mixers(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        rotated = [int(block.position.type == "rotary") for block in layers]
        found = super().write_mixers(config, layers)
        found |= next((self.write_position(block) for block in layers if block.position.type == "rotary"), {})
        return found | {"no_rope_layers": rotated, "use_sliding_window": SLIDING in found["layer_types"]}
