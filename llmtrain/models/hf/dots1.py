"""dots.llm1 (arXiv:2506.05767) as transformers' Dots1ForCausalLM: Qwen3's attention, and DeepSeek-V3's experts behind the first
layers."""

from __future__ import annotations

from typing import Any

from transformers import Dots1Config

from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS, ExpertLayers
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection


class Dots1(ExpertLayers):
    kind = Dots1Config
    architecture = "Dots1ForCausalLM"
    model_type = "dots1"
    has_layer_types = True
    number = "n_routed_experts"
    shared_width = "n_shared_experts"
    router = BIASED_SIGMOID
    router_fields = SIGMOID_FIELDS
    aux_loss = None
    shared = "mlp.shared_experts"

    def is_sparse(self, config: Any, layer: int) -> bool:
        return layer >= config.first_k_dense_replace

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        for key in ("n_routed_experts", "n_shared_experts", "num_experts_per_tok"):
            refusals.unless(bool(getattr(config, key)), key, getattr(config, key), "the class needs a number")
        refusals.check()
        return super().read_block(config, layer_type, refusals) | {"qk_norm": "head"}

    def read_shared_width(self, config: Any) -> int:
        return config.n_shared_experts * config.moe_intermediate_size

    def write_shared_width(self, mlp: ExpertsSection, shared: MLPSection) -> dict[str, Any]:
        return {"n_shared_experts": max(shared.d_ff // mlp.d_ff, 1)}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        first = next(i for i, block in enumerate(layers) if isinstance(block.mlp, ExpertsSection))
        windows = [i for i, block in enumerate(layers) if block.sliding_window is not None]
        return {"first_k_dense_replace": first, "max_window_layers": min(windows, default=len(layers))}


FAMILY = Dots1()
