"""DeepSeek-V2 (arXiv:2405.04434) as transformers' DeepseekV2ForCausalLM: latent attention, and experts behind the first layers."""

from typing import Any

from transformers import DeepseekV2Config

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.experts import ExpertsBehindDense
from llmtrain.models.hf.latent_attention import LatentLayers
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.experts import ExpertsSection

_METHODS = ("greedy", "group_limited_greedy")


class DeepseekV2(ExpertsBehindDense, LatentLayers):
    """Not read, because without effect on the outputs: norm_topk_prob, and n_group and topk_group unless topk_method limits a
    token's experts to groups."""

    kind = DeepseekV2Config
    router = {"type": "softmax", "renormalize": False}
    router_fields = {"routed_scaling_factor": "scale"}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        method = config.topk_method
        refusals.unless(method in _METHODS, "topk_method", method, f"there are {' and '.join(_METHODS)}")
        return super().read_block(config, layer_type, refusals)

    def read_experts(self, config: Any, mlp: dict[str, Any]) -> dict[str, Any]:
        made = super().read_experts(config, mlp)
        if config.topk_method == _METHODS[1]:
            made["router"] |= {"groups": config.n_group, "top_groups": config.topk_group, "group_score": "best"}
        made["shared"]["bias"] = mlp["bias"]  # mlp_bias is of these MLPs and of dense layers, not of experts
        return made

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        mlp = next((block.mlp for block in layers if isinstance(block.mlp, ExpertsSection)), None)
        found = super().write_fields(config, layers)
        if mlp is None:
            return found
        biased = {"mlp_bias": mlp.shared is not None and mlp.shared.bias}
        if mlp.router.groups == 1:
            return found | biased | {"topk_method": _METHODS[0]}
        groups = {"n_group": mlp.router.groups, "topk_group": mlp.router.top_groups}
        return found | biased | groups | {"topk_method": _METHODS[1]}
