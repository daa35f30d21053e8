"""OLMoE (arXiv:2409.02060) as transformers' OlmoeForCausalLM: norms of queries and keys, and experts in every layer."""

from typing import Any

from transformers import OlmoeConfig

from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.hf.settings import Refusals


class Olmoe(ExpertLayers):
    kind = OlmoeConfig
    width = "intermediate_size"
    block = {"qk_norm": "full"}
    router_fields = {"norm_topk_prob": "renormalize"}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        clip = config.clip_qkv
        refusals.unless(
            clip is None, "clip_qkv", clip, "the class clips behind the norms of queries and keys; null is possible"
        )
        return super().read_block(config, layer_type, refusals)
