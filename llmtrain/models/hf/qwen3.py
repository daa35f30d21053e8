"""Qwen3 (arXiv:2505.09388) as transformers' Qwen3ForCausalLM: queries and keys with a norm per head, and biases if wanted."""

from transformers import Qwen3Config

from llmtrain.models.hf.qwen2 import Qwen2


class Qwen3(Qwen2):
    kind = Qwen3Config
    block = {"qk_norm": "head"}
