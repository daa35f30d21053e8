"""Granite 3's mixtures (IBM) as transformers' GraniteMoeForCausalLM: Granite with experts in every layer."""

from transformers import GraniteMoeConfig

from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.hf.granite import Granite


class StackedExperts(ExpertLayers):
    """Experts as IBM's classes have them: a softmax of the chosen logits, and one tensor for the matrices of all experts."""

    number = "num_local_experts"
    width = "intermediate_size"
    router = {"type": "top_k_softmax"}
    moe = "block_sparse_moe"
    gate = "router.layer"
    expert_in = ("input_linear",)
    expert_out = "output_linear"
    stacked = True


class GraniteMoe(StackedExperts, Granite):
    kind = GraniteMoeConfig
