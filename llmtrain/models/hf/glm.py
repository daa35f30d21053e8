"""GLM-4 of 2024 (arXiv:2406.12793) as transformers' GlmForCausalLM: Llama with a part of each head rotated, neighbour with
neighbour."""

from __future__ import annotations

from typing import Any

from transformers import GlmConfig

from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Glm(Decoder):
    kind = GlmConfig
    architecture = "GlmForCausalLM"
    model_type = "glm"
    partial_rotary = True
    default_fraction = 0.5
    in_pairs = True
    mlp_in = ("gate_up_proj",)

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        return super().read_block(config, layer_type, refusals) | {"out_bias": False}


FAMILY = Glm()
