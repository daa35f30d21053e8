"""OLMo 3 (arXiv:2512.13961) as transformers' Olmo3ForCausalLM: OLMo 2 with a window in most layers."""

from typing import Any

from transformers import Olmo3Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.olmo2 import Olmo2


class Olmo3(Olmo2):
    kind = Olmo3Config
    has_layer_types = True

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return settings.write_rotary_by_type(layers)
