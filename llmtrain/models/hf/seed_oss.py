"""Seed-OSS (ByteDance, 2025) as transformers' SeedOssForCausalLM: Llama with biases of its own for queries, keys and values."""

from typing import Any

from transformers import SeedOssConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class SeedOss(Decoder):
    kind = SeedOssConfig

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        biases = {"qkv_bias": config.attention_bias, "out_bias": config.attention_out_bias}
        return super().read_block(config, layer_type, refusals) | biases

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return {"attention_out_bias": layers[0].out_bias}
