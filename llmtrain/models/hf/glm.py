"""GLM-4 of 2024 (arXiv:2406.12793) as transformers' GlmForCausalLM: Llama with a part of each head rotated, neighbour with
neighbour."""

from transformers import GlmConfig

from llmtrain.models.hf.decoder import Decoder


class Glm(Decoder):
    kind = GlmConfig
    block = {"out_bias": False}
    partial_rotary = True
    default_fraction = 0.5
    in_pairs = True
    mlp_in = ("gate_up_proj",)
