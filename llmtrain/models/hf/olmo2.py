"""OLMo 2 (arXiv:2501.00656) as transformers' Olmo2ForCausalLM: norms of what mixer and MLP add, and of whole queries and keys."""

from transformers import Olmo2Config

from llmtrain.models.hf.decoder import Decoder


class Olmo2(Decoder):
    kind = Olmo2Config
    block = {"qk_norm": "full"}
    norm = {"type": "rmsnorm", "place": "after"}
    norms = {"norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}
