"""Gemma 3's text models (arXiv:2503.19786) as transformers' Gemma3ForCausalLM: Gemma 2 with norms of queries and keys, and other
rotary positions in layers with a window."""

from typing import Any

from transformers import Gemma3TextConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf import settings
from llmtrain.models.hf.gemma2 import Gemma2
from llmtrain.models.hf.settings import Refusals


class Gemma3Text(Gemma2):
    kind = Gemma3TextConfig
    architecture = "Gemma3ForCausalLM"
    block = {"qk_norm": "head"}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        cap = config.attn_logit_softcapping
        refusals.unless(
            cap is None, "attn_logit_softcapping", cap, f"{self.architecture} passes over it; set it to null"
        )
        return super().read_block(config, layer_type, refusals)

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        rotary = settings.write_rotary_by_type(layers)
        local = rotary["rope_parameters"][settings.SLIDING]["rope_theta"]
        fields = super().write_fields(config, layers) | rotary | {"rope_local_base_freq": local}
        return fields | {"attn_logit_softcapping": None}
