"""Helium (Kyutai, 2025) as transformers' HeliumForCausalLM: Llama with positions that turn neighbouring channels."""

from typing import Any

from transformers import HeliumConfig

from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Helium(Decoder):
    kind = HeliumConfig
    in_pairs = True
    block = {"out_bias": False}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        together = config.head_dim * config.num_attention_heads
        instead = f"heads are together as wide as hidden_size, {config.hidden_size}, in this class"
        refusals.unless(together == config.hidden_size, "head_dim", config.head_dim, instead)
        return super().read_block(config, layer_type, refusals)
