"""Families of Gated DeltaNet and attention layers: what they share beside what Decoder has."""

from collections.abc import Sequence
from typing import Any, ClassVar

from llmtrain.models.config import AttentionBlock, GatedDeltaNetBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals

_FIELDS = {
    "linear_num_value_heads": "n_heads",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "key_head_dim",
    "linear_value_head_dim": "value_head_dim",
    "linear_conv_kernel_dim": "d_conv",
}
"""Keys of config.json, and what they are of our block."""


class GatedDeltaNetDecoder(Decoder):
    """A family whose layers are Gated DeltaNet or attention without a window, each with a gated MLP."""

    has_layer_types = True
    layer_kinds = (LINEAR, FULL)
    linear_mixer: ClassVar[str] = "linear_attn"
    positions: ClassVar[Sequence[str]] = ("rotary",)
    """Types of positions of attention."""

    def block_names(self, types: list[str]) -> dict[str, str]:
        return {kind: {LINEAR: "gdn", FULL: "attn"}[kind] for kind in types}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        if layer_type != LINEAR:
            return super().read_block(config, layer_type, refusals)
        act = config.hidden_act
        refusals.unless(act in ("silu", "swish"), "hidden_act", act, "the convolution has silu, as the MLP then")
        block: dict[str, Any] = {"type": "gated_deltanet"}
        block |= {ours: getattr(config, theirs) for theirs, ours in _FIELDS.items() if ours != "key_heads"}
        if config.linear_num_key_heads != config.linear_num_value_heads:
            block["n_key_heads"] = config.linear_num_key_heads
        return block | {"mlp": {"type": "swiglu", "d_ff": config.intermediate_size}}

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        kinds = {"gated_deltanet": GatedDeltaNetBlock, "attention": AttentionBlock}
        found, refusals = settings.layer_blocks(config, self.architecture, kinds, self.experts), Refusals()
        for key, block in settings.used_blocks(config):
            settings.refuse_other_wiring(f"model.blocks.{key}", block, self.architecture, refusals, self.positions)
        refusals.check()
        return found

    def write_mixers(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        attention = [block for block in layers if isinstance(block, AttentionBlock)]
        types = [FULL if isinstance(block, AttentionBlock) else LINEAR for block in layers]
        return (self.write_attention(config, attention[0]) if attention else {}) | {"layer_types": types}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock | GatedDeltaNetBlock]) -> dict[str, Any]:
        linear = next((block for block in layers if isinstance(block, GatedDeltaNetBlock)), None)
        sizes = {theirs: getattr(linear, ours) for theirs, ours in _FIELDS.items()} if linear else {}
        return {"hidden_act": "silu"} | sizes  # the only one that the convolution can have
