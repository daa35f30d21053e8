"""GLM-4-0414 as transformers' Glm4ForCausalLM: norms on both sides of a branch, a part of each head rotated, neighbour with
neighbour."""

from transformers import Glm4Config

from llmtrain.models.hf.glm import Glm


class Glm4(Glm):
    kind = Glm4Config
    norm = {"type": "rmsnorm", "place": "both"}
    norms = {
        "norm": "input_layernorm",
        "post_norm": "post_self_attn_layernorm",
        "mlp_norm": "post_attention_layernorm",
        "mlp_post_norm": "post_mlp_layernorm",
    }
