"""Qwen3-Next as transformers' Qwen3NextForCausalLM: Gated DeltaNet, and gated attention whose heads are rotated
in part, with experts and without."""

from typing import Any

from transformers import Qwen3NextConfig

from llmtrain.models.config import AttentionBlock, GatedDeltaNetBlock, ModelConfig
from llmtrain.models.hf import tensors
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.gated_deltanet import GatedDeltaNetDecoder
from llmtrain.models.hf.qwen3_moe import SparseSteps


class Qwen3Next(SparseSteps, GatedDeltaNetDecoder):
    dense = True
    shared_width = "shared_expert_intermediate_size"
    shared = "mlp.shared_expert"
    shared_gate = "shared_expert_gate"
    kind = Qwen3NextConfig
    norm = {"type": "rmsnorm", "zero_centered": True}
    partial_rotary = True
    block = {"qk_norm": "head", "output_gate": True}

    def write_position(self, block: AttentionBlock) -> dict[str, Any]:
        assert block.position.type == "rotary"
        # Without a fraction the class takes a quarter.
        written, fraction = super().write_position(block), {"partial_rotary_factor": block.position.fraction}
        return written | fraction | {"rope_parameters": written["rope_parameters"] | fraction}

    def mixer_weights(
        self, ours: str, theirs: str, block: AttentionBlock | GatedDeltaNetBlock, config: ModelConfig
    ) -> list[Weight]:
        if isinstance(block, AttentionBlock):
            return super().mixer_weights(ours, theirs, block, config)
        keys, values = block.widths()
        per_group = block.n_heads // block.key_heads
        key, value = block.key_head_dim, per_group * block.value_head_dim
        return tensors.gated_deltanet_mixer(
            ours,
            f"{theirs}.{self.linear_mixer}",
            block,
            config,
            projections={"in_proj_qkvz": 2 * keys + 2 * values, "in_proj_ba": 2 * block.n_heads},
            by_group={"in_proj_qkvz": (key, key, value, value), "in_proj_ba": (per_group, per_group)},
        )
