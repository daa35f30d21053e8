"""Bamba (IBM, Princeton, UIUC) as transformers' BambaForCausalLM: Mamba-2, and attention whose heads are rotated in part."""

from typing import Any

from transformers import BambaConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.hybrid_decoder import HybridDecoder
from llmtrain.models.hf.settings import Refusals


class Bamba(HybridDecoder):
    """Not read besides: z_loss_coefficient, of training."""

    kind = BambaConfig
    partial_rotary = True
    final_norm = "model.final_layernorm"
    norms = {"norm": "input_layernorm", "mlp_norm": "pre_ff_layernorm"}
    mlp = "feed_forward"

    def layer_types(self, config: Any, refusals: Refusals) -> list[str]:
        return config.layers_block_type

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        attention = {i: block for i, block in enumerate(layers) if isinstance(block, AttentionBlock)}
        fields: dict[str, Any] = {"attn_layer_indices": list(attention)}
        for block in attention.values():
            assert block.position.type == "rotary"
            # Without a fraction the class takes a half.
            fraction, rope = {"partial_rotary_factor": block.position.fraction}, settings.write_rotary(block.position)
            return fields | {key: rope[key] and rope[key] | fraction for key in ("rope_parameters", "rope_scaling")}
        return fields
