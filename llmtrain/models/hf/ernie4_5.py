"""ERNIE 4.5 (Baidu, 2025), dense, as transformers' Ernie4_5ForCausalLM: Llama with positions that turn neighbouring channels, and
one setting for all biases."""

from typing import Any

from transformers import Ernie4_5Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Ernie45(Decoder):
    kind = Ernie4_5Config
    in_pairs = True

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block, biased = super().read_block(config, layer_type, refusals), bool(config.use_bias)
        return block | {"qkv_bias": biased, "out_bias": biased, "mlp": block["mlp"] | {"bias": biased}}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return {"use_bias": layers[0].qkv_bias}
