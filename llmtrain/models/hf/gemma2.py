"""Gemma 2 (arXiv:2408.00118) as transformers' Gemma2ForCausalLM: norms on both sides of a branch, soft caps, a window in every
second layer, embeddings times sqrt(d_model), a GELU gate."""

from typing import Any

from transformers import Gemma2Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Gemma2(Decoder):
    kind = Gemma2Config
    has_layer_types = True
    activation = "hidden_activation"
    norm = {"type": "rmsnorm", "zero_centered": True, "place": "both"}
    norms = {
        "norm": "input_layernorm",
        "post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    }

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        found = config.use_bidirectional_attention
        refusals.unless(not found, "use_bidirectional_attention", found, "attention is causal here")
        return {"embedding_multiplier": config.hidden_size**0.5, "logit_softcap": config.final_logit_softcapping}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block, scalar = super().read_block(config, layer_type, refusals), config.query_pre_attn_scalar
        refusals.unless(scalar > 0, "query_pre_attn_scalar", scalar, "must be positive")
        scale = {"softmax_scale": scalar**-0.5} if scalar > 0 and scalar != config.head_dim else {}
        return block | scale | {"softcap": config.attn_logit_softcapping}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return {
            "query_pre_attn_scalar": round(layers[0].spec(config.d_model).scale ** -2),  # the class takes whole numbers
            "attn_logit_softcapping": layers[0].softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
