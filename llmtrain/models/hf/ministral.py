"""Ministral (Mistral AI, 2024) as transformers' MinistralForCausalLM: Mistral with a window in some layers."""

from transformers import MinistralConfig

from llmtrain.models.hf.decoder import Decoder


class Ministral(Decoder):
    kind = MinistralConfig
    has_layer_types = True
