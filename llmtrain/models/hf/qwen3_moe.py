"""Qwen3's mixtures (arXiv:2505.09388) as transformers' Qwen3MoeForCausalLM: Qwen3 with experts in some layers or all."""

from typing import Any

from transformers import Qwen3MoeConfig

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.experts import ExpertLayers
from llmtrain.models.sections.experts import ExpertsSection


class SparseSteps(ExpertLayers):
    """Experts in every decoder_sparse_step-th layer but mlp_only_layers, by Qwen's keys."""

    router_fields = {"norm_topk_prob": "renormalize"}

    def is_sparse(self, config: Any, layer: int) -> bool:
        every = config.num_experts > 0 and (layer + 1) % config.decoder_sparse_step == 0
        return every and layer not in config.mlp_only_layers

    def write_feed_forward(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        dense = [i for i, block in enumerate(layers) if not isinstance(block.mlp, ExpertsSection)]
        without = len(dense) == len(layers)
        return super().write_feed_forward(config, layers) | {"mlp_only_layers": [] if without else dense}


class Qwen3Moe(SparseSteps):
    kind = Qwen3MoeConfig
    block = {"qk_norm": "head"}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        return {"use_sliding_window": any(block.sliding_window is not None for block in layers)}
