"""OLMo Hybrid as transformers' OlmoHybridForCausalLM: OLMo 3's attention, with or without positions, among Gated DeltaNet layers
whose norms come first."""

from dataclasses import replace
from typing import Any

from transformers import OlmoHybridConfig

from llmtrain.models.config import AttentionBlock, GatedDeltaNetBlock, ModelConfig
from llmtrain.models.hf import tensors
from llmtrain.models.hf.family import OtherLayersError, Part, Weight
from llmtrain.models.hf.gated_deltanet import GatedDeltaNetDecoder
from llmtrain.models.hf.olmo2 import Olmo2
from llmtrain.models.hf.settings import LINEAR, Refusals

_GATED_NORM_EPS = 1e-5  # the class's own, whatever rms_norm_eps
_LINEAR_NORMS = {"norm": "attention_layer_norm", "mlp_norm": "feedforward_layer_norm"}
_ALSO = {
    "attention_layer_norm": "input_layernorm",
    "feedforward_layer_norm": "post_attention_layernorm",
    "post_attention_layernorm": "feedforward_layer_norm",
}
"""Other names of norms."""
_INIT = {"linear_dt_min": "dt_min", "linear_dt_max": "dt_max"}


class OlmoHybrid(GatedDeltaNetDecoder):
    """Names of tensors are those of files: transformers renames norms of Gated DeltaNet layers as it loads, and as it saves
    renames one of attention layers too. Both are read.
    """

    kind = OlmoHybridConfig
    positions = ("rotary", "none")

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type, refusals)
        if layer_type != LINEAR:
            return block | {"qk_norm": "full", "norm": {**Olmo2.norm, "eps": config.rms_norm_eps}}
        low, high = config.linear_a_log_min, config.linear_a_log_max  # of A, not of its logarithm
        return block | {
            "negative_eigenvalues": config.linear_allow_neg_eigval,
            **({"gated_norm_eps": _GATED_NORM_EPS} if config.rms_norm_eps != _GATED_NORM_EPS else {}),
            **({"a_init_range": (low, high)} if 0 < low <= high else {}),
            **{ours: getattr(config, theirs) for theirs, ours in _INIT.items()},
        }

    def read_position(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        if config.rope_parameters["rope_theta"] is None:
            return {"type": "none"}
        return super().read_position(config, layer_type, refusals)

    def write_position(self, block: AttentionBlock) -> dict[str, Any]:
        if block.position.type == "none":  # without any rope_parameters the class has rotary ones
            return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
        return super().write_position(block)

    def write_fields(self, config: ModelConfig, layers: list[AttentionBlock | GatedDeltaNetBlock]) -> dict[str, Any]:
        linear = next(block for block in layers if isinstance(block, GatedDeltaNetBlock))
        low, high = linear.a_init_range
        return super().write_fields(config, layers) | {
            "linear_allow_neg_eigval": linear.negative_eigenvalues,
            "linear_a_log_min": low,
            "linear_a_log_max": high,
            **{theirs: getattr(linear, ours) for theirs, ours in _INIT.items()},
        }

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        layers = super().layer_blocks(config)
        if len({type(block) for block in layers}) < 2:
            instead = f"{self.architecture} has at least one gated_deltanet and one attention layer"
            raise OtherLayersError(f"model.layers = {config.layers}: {instead}")
        return layers

    def norms_of(self, block: AttentionBlock | GatedDeltaNetBlock) -> dict[str, str]:
        return _LINEAR_NORMS if isinstance(block, GatedDeltaNetBlock) else Olmo2.norms

    def weights(self, config: ModelConfig) -> list[Weight]:
        return [replace(weight, parts=tuple(map(_with_spelling, weight.parts))) for weight in super().weights(config)]

    def mixer_weights(
        self, ours: str, theirs: str, block: AttentionBlock | GatedDeltaNetBlock, config: ModelConfig
    ) -> list[Weight]:
        if isinstance(block, AttentionBlock):
            return super().mixer_weights(ours, theirs, block, config)
        keys, values = block.widths()
        return tensors.gated_deltanet_mixer(
            ours,
            f"{theirs}.{self.linear_mixer}",
            block,
            config,
            projections={
                **{"q_proj": keys, "k_proj": keys, "v_proj": values, "g_proj": values},
                **{"b_proj": block.n_heads, "a_proj": block.n_heads},
            },
            conv=("q_conv1d", "k_conv1d", "v_conv1d"),
            norm="o_norm",
            out="o_proj",
        )


def _with_spelling(part: Part) -> Part:
    *before, name, kind = part.name.split(".")
    return replace(part, copies=(".".join([*before, _ALSO[name], kind]),)) if name in _ALSO else part
