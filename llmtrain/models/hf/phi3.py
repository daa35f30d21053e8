"""Phi-3 and Phi-4 (arXiv:2404.14219, arXiv:2412.08905) as transformers' Phi3ForCausalLM: Llama with fused projections, and
heads that are rotated in part."""

from typing import Any

from transformers import Phi3Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.decoder import Decoder


class Phi3(Decoder):
    kind = Phi3Config
    partial_rotary = True
    qkv = ("qkv_proj",)
    mlp_in = ("gate_up_proj",)

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        position = layers[0].position
        assert position.type == "rotary"
        return settings.write_rotary(
            position.model_copy(update={"scaling": None}), partial=True
        )  # it has LongRoPE alone
