"""Apertus (Swiss AI, arXiv:2509.14233) as transformers' ApertusForCausalLM: Llama with norms of queries and keys, and an MLP of two
matrices with xIELU."""

from dataclasses import replace

from transformers import ApertusConfig

from llmtrain.models.feed_forward.dense import XIELU
from llmtrain.models.hf import tensors
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.sections.dense import MLPSection


class Apertus(Decoder):
    kind = ApertusConfig
    block = {"qk_norm": "head"}
    gated = False
    norms = {"norm": "attention_layernorm", "mlp_norm": "feedforward_layernorm"}
    mlp_in = ("up_proj",)

    def mlp_weights(self, ours: str, theirs: str, mlp: MLPSection, d_model: int) -> list[Weight]:
        made = super().mlp_weights(ours, theirs, mlp, d_model)
        if mlp.type != "xielu":
            return made
        act = f"{theirs}.act_fn"
        alphas = [tensors.same(f"{ours}.xielu.{name}", f"{act}.{name}", 1) for name in ("alpha_p", "alpha_n")]
        constants = (Part(f"{act}.beta", (), value=XIELU.beta), Part(f"{act}.eps", (), value=XIELU.eps))
        return [*made, alphas[0], replace(alphas[1], parts=(*alphas[1].parts, *constants))]
