"""Mistral (Jiang et al., arXiv:2310.06825) as transformers' MistralForCausalLM: Llama with a window in every layer, or none."""

from transformers import MistralConfig

from llmtrain.models.hf.decoder import Decoder


class Mistral(Decoder):
    kind = MistralConfig
