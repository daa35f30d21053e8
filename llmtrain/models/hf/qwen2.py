"""Qwen2 and Qwen2.5 (arXiv:2407.10671, arXiv:2412.15115) as transformers' Qwen2ForCausalLM: Llama with biases on q, k and v,
and a window in some layers."""

from typing import Any

from transformers import Qwen2Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder


class Qwen2(Decoder):
    kind = Qwen2Config
    block = {"qkv_bias": True, "out_bias": False}
    has_layer_types = True

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        """Keys for readers without layer_types: whether there are windows, and in how many layers at the bottom there are none."""
        at = [i for i, layer in enumerate(layers) if layer.sliding_window is not None]
        return {"use_sliding_window": bool(at), "max_window_layers": min(at, default=len(layers))}
