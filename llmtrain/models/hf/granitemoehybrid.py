"""Granite 4 (IBM), with experts or without, as transformers' GraniteMoeHybridForCausalLM: Mamba-2 and attention, mostly without
positions, with factors of embeddings, scores, branches and logits."""

from typing import Any

from transformers import GraniteMoeHybridConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.granite import read_multipliers
from llmtrain.models.hf.granitemoe import StackedExperts
from llmtrain.models.hf.hybrid_decoder import HybridDecoder
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals, inverse
from llmtrain.models.sections.dense import MLPSection

_PUBLISHED = {LINEAR: "mamba", FULL: "attention"}
"""Names in layer_types, as on the hub; transformers 5 renames them as it reads, and earlier ones do not know its names."""


class GraniteMoeHybrid(StackedExperts, HybridDecoder):
    """Each layer has an MLP, shared_mlp, alone or beside its experts."""

    dense = True
    shared_width = "shared_intermediate_size"
    shared = "shared_mlp"
    kind = GraniteMoeHybridConfig
    positions = ("none", "rotary")
    mlp = "shared_mlp"
    mlp_in = ("input_linear",)
    mlp_out = "output_linear"

    has_layer_types = True

    def is_sparse(self, config: Any, layer: int) -> bool:
        return bool(config.num_local_experts)

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        return read_multipliers(config, refusals)

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type, refusals)
        block["residual_multiplier"] = float(config.residual_multiplier)
        if not config.num_local_experts:
            block["mlp"] |= {"d_ff": config.shared_intermediate_size}
        if block["type"] == "attention":
            block["softmax_scale"] = float(config.attention_multiplier)
            if config.position_embedding_type != "rope":
                block["position"] = {"type": "none"}
        return block

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        written = super().write_config(config)
        return written | {"layer_types": [_PUBLISHED[kind] for kind in written["layer_types"]]}

    def write_feed_forward(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        fields = super().write_feed_forward(config, layers)
        if isinstance(layers[0].mlp, MLPSection):
            fields |= {"num_experts_per_tok": 0, "shared_intermediate_size": layers[0].mlp.d_ff}
        return fields

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        attention = next((block for block in layers if isinstance(block, AttentionBlock)), None)
        return {
            "layer_types": [FULL if isinstance(block, AttentionBlock) else LINEAR for block in layers],
            "position_embedding_type": "rope" if attention and attention.position.type == "rotary" else "nope",
            "embedding_multiplier": config.embedding_multiplier,
            "logits_scaling": inverse(config.logit_multiplier),
            "attention_multiplier": attention.spec(config.d_model).scale if attention else 1.0,
            "residual_multiplier": layers[0].residual_multiplier,
        }
