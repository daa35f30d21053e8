"""StarCoder2 (arXiv:2402.19173) as transformers' Starcoder2ForCausalLM: LayerNorm, a GELU MLP, and biases everywhere or nowhere."""

from typing import Any

from transformers import Starcoder2Config

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class Starcoder2(Decoder):
    kind = Starcoder2Config
    eps = "norm_epsilon"
    gated = False
    norm = {"type": "layernorm", "bias": True}
    mlp_in = ("c_fc",)
    mlp_out = "c_proj"

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block, bias = super().read_block(config, layer_type, refusals), config.use_bias
        return block | {"qkv_bias": bias, "out_bias": bias, "mlp": block["mlp"] | {"bias": bias}}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        return {"use_bias": layers[0].qkv_bias}
