"""Mixtral (arXiv:2401.04088) as transformers' MixtralForCausalLM: Mistral with experts in every layer."""

from transformers import MixtralConfig

from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.hf.mistral import Mistral


class Mixtral(ExpertLayers, Mistral):
    """router_jitter_noise is read as our jitter: of the router's input alone, where the class has it in the experts' too."""

    kind = MixtralConfig
    number = "num_local_experts"
    width = "intermediate_size"
    router_fields = {"router_jitter_noise": "jitter"}
    moe = "block_sparse_moe"
    expert_in = ("w1", "w3")
    expert_out = "w2"
