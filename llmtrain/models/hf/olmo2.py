"""OLMo 2 (arXiv:2501.00656) as transformers' Olmo2ForCausalLM: norms of what mixer and MLP add, and of whole queries and keys."""

from typing import Any

from transformers import Olmo2Config

from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Olmo2(Decoder):
    kind = Olmo2Config
    architecture = "Olmo2ForCausalLM"
    model_type = "olmo2"
    norm = {"type": "rmsnorm", "place": "after"}
    norms = {"norm": "post_attention_layernorm", "mlp_norm": "post_feedforward_layernorm"}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        return super().read_block(config, layer_type, refusals) | {"qk_norm": "full"}


FAMILY = Olmo2()
