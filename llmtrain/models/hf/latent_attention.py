"""Families whose attention is latent (MLA), with DeepSeek's keys in config.json: what they share."""

import math
from typing import Any, ClassVar

from llmtrain.models.config import LatentAttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.sections.layers import YarnScaling


class LatentLayers(Decoder):
    """A family of layers that are all latent attention, with rotary positions of neighbouring channels."""

    eps_of_latents: ClassVar[float] = 1e-6

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        heads, found = config.num_attention_heads, config.num_key_value_heads
        refusals.unless(
            found == heads, "num_key_value_heads", found, f"there are as many as num_attention_heads, {heads}"
        )
        in_pairs = getattr(config, "rope_interleave", True)
        refusals.unless(bool(in_pairs), "rope_interleave", in_pairs, "positions turn neighbouring channels; set true")
        kind = settings.read_mlp(config, self.activation, refusals, self.gated)
        block = {
            "type": "latent_attention",
            "n_heads": heads,
            "q_rank": config.q_lora_rank,
            "kv_rank": config.kv_lora_rank,
            "nope_dim": config.qk_nope_head_dim,
            "rope_dim": config.qk_rope_head_dim,
            "value_dim": config.v_head_dim,
            "position": self.read_position(config, layer_type, refusals),
            "latent_eps": self.eps_of_latents,
            "latent_bias": config.attention_bias,
            "out_bias": config.attention_bias,
            "mlp": {"type": kind, "d_ff": config.intermediate_size, "bias": getattr(config, "mlp_bias", False)},
        }
        sharper = _sharper(config.rope_parameters)
        scale = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5 * sharper
        return block | ({} if sharper == 1 else {"softmax_scale": scale})

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        kinds = {"latent_attention": LatentAttentionBlock}
        return settings.layer_blocks(config, self.architecture, kinds, self.experts)

    def write_mixers(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        block: LatentAttentionBlock = layers[0]
        return {
            "num_attention_heads": block.n_heads,
            "num_key_value_heads": block.n_heads,
            "q_lora_rank": block.q_rank,
            "kv_lora_rank": block.kv_rank,
            "qk_nope_head_dim": block.nope_dim,
            "qk_rope_head_dim": block.rope_dim,
            "v_head_dim": block.value_dim,
            "attention_bias": block.latent_bias,
            **self.write_latent_position(block),
        }

    def write_latent_position(self, block: LatentAttentionBlock) -> dict[str, Any]:
        if block.position.type != "rotary":
            return {}
        written = settings.write_rotary(block.position)
        sharper, scaling = block.spec().scale * block.head_dim**0.5, block.position.scaling
        if scaling is None or scaling.factor <= 1 or math.isclose(sharper, 1):
            return written
        weight = (math.sqrt(sharper) - 1) / (0.1 * math.log(scaling.factor))
        further: dict[str, Any] = {"mscale_all_dim": round(weight, 9)}
        if isinstance(scaling, YarnScaling) and scaling.attention_factor == 1:  # DeepSeek's spelling
            further["mscale"] = further["mscale_all_dim"]
        for rope in (written["rope_parameters"], written["rope_scaling"]):
            rope |= further
            if "mscale" in further:
                del rope["attention_factor"]
        return written

    def mixer_weights(self, ours: str, theirs: str, block: Any, config: ModelConfig) -> list[Weight]:
        return tensors.latent_attention_mixer(ours, f"{theirs}.{self.mixer}", block, config, in_pairs=True)


def _sharper(rope: dict[str, Any]) -> float:
    """Factor of the scores, which the classes give them by positions for longer contexts."""
    weight = rope.get("mscale_all_dim") if rope["rope_type"] != "default" else None
    return settings.magnitude(rope["factor"], weight) ** 2 if weight else 1.0
