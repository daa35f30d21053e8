"""Granite 4 (IBM) without experts as transformers' GraniteMoeHybridForCausalLM: Mamba-2 and attention, mostly without positions,
with factors of embeddings, scores, branches and logits."""

from __future__ import annotations

from typing import Any

from transformers import GraniteMoeHybridConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.granite import read_multipliers
from llmtrain.models.hf.hybrid_decoder import HybridDecoder
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals, inverse

_PUBLISHED = {LINEAR: "mamba", FULL: "attention"}
"""Names in layer_types, as on the hub; transformers 5 renames them as it reads, and earlier ones do not know its names."""


class GraniteMoeHybrid(HybridDecoder):
    """Not read besides: what belongs to experts, of which there are none."""

    kind = GraniteMoeHybridConfig
    architecture = "GraniteMoeHybridForCausalLM"
    model_type = "granitemoehybrid"
    positions = ("none", "rotary")
    mlp = "shared_mlp"
    mlp_in = ("input_linear",)
    mlp_out = "output_linear"

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        experts = config.num_local_experts
        refusals.unless(not experts, "num_local_experts", experts, "an MLP here has no routed experts; 0 is possible")
        return settings.layer_types(config, True, refusals, (LINEAR, FULL))

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        return read_multipliers(config, refusals)

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type, refusals)
        block |= {
            "residual_multiplier": float(config.residual_multiplier),
            "mlp": block["mlp"] | {"d_ff": config.shared_intermediate_size},
        }
        if layer_type == FULL:
            block["softmax_scale"] = float(config.attention_multiplier)
            if config.position_embedding_type != "rope":
                block["position"] = {"type": "none"}
        return block

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        written = super().write_config(config)
        return written | {"layer_types": [_PUBLISHED[kind] for kind in written["layer_types"]]}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        attention = next((block for block in layers if isinstance(block, AttentionBlock)), None)
        return {
            "num_local_experts": 0,
            "num_experts_per_tok": 0,
            "shared_intermediate_size": layers[0].mlp.d_ff,
            "layer_types": [FULL if isinstance(block, AttentionBlock) else LINEAR for block in layers],
            "position_embedding_type": "rope" if attention and attention.position.type == "rotary" else "nope",
            "embedding_multiplier": config.embedding_multiplier,
            "logits_scaling": inverse(config.logit_multiplier),
            "attention_multiplier": attention.spec(config.d_model).scale if attention else 1.0,
            "residual_multiplier": layers[0].residual_multiplier,
        }


FAMILY = GraniteMoeHybrid()
