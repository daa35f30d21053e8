"""GPT-NeoX and Pythia (arXiv:2204.06745, arXiv:2304.01373) as transformers' GPTNeoXForCausalLM: attention and MLP side by side,
LayerNorm and biases, heads that are rotated in part."""

from typing import Any

from transformers import GPTNeoXConfig

from llmtrain.models.config import AttentionBlock, ModelConfig
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.settings import Refusals


class GPTNeoX(Decoder):
    """model.dropout is hidden_dropout."""

    kind = GPTNeoXConfig
    eps = "layer_norm_eps"
    gated = False
    partial_rotary = True
    norm = {"type": "layernorm", "bias": True}

    embedding = "gpt_neox.embed_in"
    layers = "gpt_neox.layers"
    final_norm = "gpt_neox.final_layer_norm"
    head = ("embed_out.weight", "lm_head.weight")
    mixer = "attention"
    qkv = ("query_key_value",)
    qkv_by_head = True
    out = "dense"
    mlp_in = ("dense_h_to_4h",)
    mlp_out = "dense_4h_to_h"

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        return {"dropout": float(config.hidden_dropout)}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type, refusals)
        return block | {"parallel": config.use_parallel_residual, "mlp": block["mlp"] | {"bias": True}}

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock]) -> dict[str, Any]:
        position = layers[0].position
        assert position.type == "rotary"
        # The spellings of before transformers 5; without a fraction the class takes a quarter.
        older = {"rotary_pct": position.fraction, "rotary_emb_base": position.theta}
        return older | {"use_parallel_residual": layers[0].parallel, "hidden_dropout": config.dropout}
