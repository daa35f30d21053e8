"""dots.llm1 (arXiv:2506.05767) as transformers' Dots1ForCausalLM: Qwen3's attention, and DeepSeek-V3's experts behind the first
layers."""

from typing import Any

from transformers import Dots1Config

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS, ExpertsBehindDense


class Dots1(ExpertsBehindDense):
    kind = Dots1Config
    block = {"qk_norm": "head"}
    has_layer_types = True
    router = BIASED_SIGMOID
    router_fields = SIGMOID_FIELDS

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        windows = (i for i, block in enumerate(layers) if block.sliding_window is not None)
        return super().write_fields(config, layers) | {"max_window_layers": next(windows, len(layers))}
