"""Granite 3 (IBM) as transformers' GraniteForCausalLM: Llama with factors of embeddings, scores, branches, logits."""

from typing import Any

from transformers import GraniteConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals, inverse


class Granite(Decoder):
    kind = GraniteConfig

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        return read_multipliers(config, refusals)

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        return super().read_block(config, layer_type, refusals) | {
            "softmax_scale": float(config.attention_multiplier),
            "residual_multiplier": float(config.residual_multiplier),
        }

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return write_multipliers(config, layers[0])


def read_multipliers(config: Any, refusals: Refusals) -> dict[str, Any]:
    """Factors of embeddings and logits; config.json has the divisor of the logits."""
    divisor = float(config.logits_scaling)
    refusals.unless(divisor > 0, "logits_scaling", divisor, "must be positive")
    return {
        "embedding_multiplier": float(config.embedding_multiplier),
        "logit_multiplier": inverse(divisor) if divisor > 0 else 1.0,
    }


def write_multipliers(config: ModelConfig, block: AttentionBlock) -> dict[str, Any]:
    return {
        "embedding_multiplier": config.embedding_multiplier,
        "logits_scaling": inverse(config.logit_multiplier),
        "attention_multiplier": block.spec(config.d_model).scale,
        "residual_multiplier": block.residual_multiplier,
    }
