"""Families of Mamba-2 and attention layers, each with an MLP, whose config.json has Llama's keys and those that begin with
mamba_: what they share."""

from collections.abc import Sequence
from typing import Any, ClassVar

from llmtrain.models.config import AttentionBlock, Block, Mamba2Block, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.family import OtherLayersError, Weight
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals
from llmtrain.models.sections.experts import ExpertsSection

_FIELDS = {
    "mamba_d_state": "d_state",
    "mamba_d_head": "head_dim",
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "d_conv",
    "mamba_chunk_size": "chunk_size",
    "mamba_conv_bias": "conv_bias",
    "mamba_proj_bias": "proj_bias",
}
"""Keys of config.json, and the fields of our Mamba-2 block that they are."""


class HybridDecoder(Decoder):
    """A family of layers that are Mamba-2 or attention.

    Not read, because without effect on the outputs: dropout of attention, use_cache, num_logits_to_keep. Not written:
    model.dropout, dt_min, dt_max and a_init_range, for which the classes have no place.
    """

    positions: ClassVar[Sequence[str]] = ("rotary",)
    """Types of positions of attention."""
    kinds: ClassVar[dict[str, type]] = {"mamba2": Mamba2Block, "attention": AttentionBlock}
    mamba: ClassVar[str] = "mamba"
    layer_kinds = (LINEAR, FULL)

    def block_names(self, types: list[str]) -> dict[str, str]:
        return {kind: {LINEAR: "mamba", FULL: "attn"}.get(kind, kind) for kind in types}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        block = super().read_block(config, layer_type, refusals)
        return read_mamba(config, refusals) | {"mlp": block["mlp"]} if layer_type == LINEAR else block

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        found, refusals = settings.layer_blocks(config, self.architecture, self.kinds, self.experts), Refusals()
        for key, block in settings.used_blocks(config):
            self.refuse_wiring(f"model.blocks.{key}", block, config, refusals)
        settings.refuse_uneven_scans(config, self.architecture, refusals)
        refusals.check(OtherLayersError)
        return found

    def refuse_wiring(self, key: str, block: Block, config: ModelConfig, refusals: Refusals) -> None:
        """Refuse what the class cannot have in a layer, and what could not be written."""
        settings.refuse_other_wiring(key, block, self.architecture, refusals, self.positions)
        kind = block.mlp and (block.mlp.activation if isinstance(block.mlp, ExpertsSection) else block.mlp.type)
        every_part = (part for _, one in settings.used_blocks(config) for _, part in one.parts())
        if any(isinstance(part, Mamba2Block) for part in every_part):
            instead = f"{self.architecture} has swiglu beside mamba2; set type: swiglu"
            refusals.unless(kind in ("swiglu", None), f"{key}.mlp.type", kind, instead)

    def write_mixers(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        # Of mixers that are in no layer the classes need sizes that fit.
        fields: dict[str, Any] = {"num_attention_heads": 1, "mamba_n_heads": 1, "mamba_d_head": "auto"}
        for block in reversed(layers):
            is_mamba = isinstance(block, Mamba2Block)
            fields |= write_mamba(config, block) if is_mamba else self.write_attention(config, block)
        return fields

    def mixer_weights(self, ours: str, theirs: str, block: Any, config: ModelConfig) -> list[Weight]:
        if isinstance(block, Mamba2Block):
            return tensors.mamba2_mixer(ours, f"{theirs}.{self.mamba}", block, config)
        return super().mixer_weights(ours, theirs, block, config)


def read_mamba(config: Any, refusals: Refusals) -> dict[str, Any]:
    """A Mamba-2 block, without its MLP."""
    act = config.hidden_act
    refusals.unless(act in ("silu", "swish"), "hidden_act", act, "only silu, which Mamba-2 layers take too")
    return {
        "type": "mamba2",
        **settings.read_inner_width(config.mamba_n_heads * config.mamba_d_head, config.hidden_size),
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        **settings.read_dt_limit(config.time_step_limit),
    }


def write_mamba(config: ModelConfig, block: Mamba2Block) -> dict[str, Any]:
    return {
        **{theirs: getattr(block, ours) for theirs, ours in _FIELDS.items()},
        "mamba_n_heads": block.spec(config.d_model).n_heads,
        "mamba_expand": max(block.inner_width(config.d_model) // config.d_model, 1),
        **settings.write_dt_limit(block),
    }
