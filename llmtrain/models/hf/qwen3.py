"""Qwen3 (arXiv:2505.09388) as transformers' Qwen3ForCausalLM: queries and keys with a norm per head, and biases if wanted."""

from typing import Any

from transformers import Qwen3Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.qwen2 import write_windows
from llmtrain.models.hf.settings import Refusals


class Qwen3(Decoder):
    kind = Qwen3Config
    architecture = "Qwen3ForCausalLM"
    model_type = "qwen3"
    has_layer_types = True

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        return super().read_block(config, layer_type, refusals) | {"qk_norm": "head"}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return write_windows(layers)


FAMILY = Qwen3()
