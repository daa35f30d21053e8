"""GLM-4.5 (arXiv:2508.06471) as transformers' Glm4MoeForCausalLM: a part of each head rotated, and DeepSeek-V3's experts behind
the first layers."""

from typing import Any

from transformers import Glm4MoeConfig

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS, ExpertsBehindDense
from llmtrain.models.hf.settings import Refusals


class Glm4Moe(ExpertsBehindDense):
    """Not read, because the class computes without them: layers that predict further tokens (num_nextn_predict_layers)."""

    kind = Glm4MoeConfig
    partial_rotary = True
    default_fraction = 0.5
    router = BIASED_SIGMOID
    router_fields = SIGMOID_FIELDS

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        own = {"qk_norm": "head" if config.use_qk_norm else "none", "out_bias": False}
        return super().read_block(config, layer_type, refusals) | own

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        return super().write_fields(config, layers) | {"use_qk_norm": layers[0].qk_norm == "head"}
