"""Kimi Linear (arXiv:2510.26692) as transformers' KimiLinearForCausalLM: Kimi Delta Attention among latent attention without
positions, with DeepSeek-V3's experts behind the first layers."""

from dataclasses import replace
from typing import Any

from transformers import KimiLinearConfig

from llmtrain.models.config import KimiDeltaBlock, LatentAttentionBlock, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.decoder import Decoder
from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS, ExpertLayers
from llmtrain.models.hf.family import Part, Weight
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection

_DELTA = {"linear_num_heads": "n_heads", "linear_head_dim": "key_head_dim", "linear_conv_kernel_dim": "d_conv"}
_LATENT = {
    "num_attention_heads": "n_heads",
    "q_lora_rank": "q_rank",
    "kv_lora_rank": "kv_rank",
    "qk_nope_head_dim": "nope_dim",
    "qk_rope_head_dim": "rope_dim",
    "v_head_dim": "value_dim",
    "attention_bias": "latent_bias",
}
"""Keys of config.json, and what they are of our blocks."""
_MOE, _MLP, _ATTENTION, _GATE = ".block_sparse_moe.", ".mlp.", ".self_attn.", ".self_attn.forget_gate."
_OF_GATE = ("f_a_proj.weight", "f_b_proj.weight", "dt_bias", "A_log")


class KimiLayers(Decoder):
    """Layers of Kimi Delta Attention and of latent attention."""

    has_layer_types = True
    layer_kinds = (LINEAR, FULL)

    def block_names(self, types: list[str]) -> dict[str, str]:
        return {kind: {LINEAR: "kda", FULL: "mla"}[kind] for kind in types}

    def read_block(self, config: Any, layer_type: str, refusals: Refusals) -> dict[str, Any]:
        act, heads, found = config.hidden_act, config.num_attention_heads, config.num_key_value_heads
        refusals.unless(act in ("silu", "swish"), "hidden_act", act, "the convolution has silu, as the MLP then")
        refusals.unless(found == heads, "num_key_value_heads", found, f"as many as num_attention_heads, {heads}")
        refusals.unless(bool(config.v_head_dim), "v_head_dim", config.v_head_dim, "the class needs a number")
        mlp = {"type": "swiglu", "d_ff": config.intermediate_size}
        if layer_type == LINEAR:
            block = {"type": "kimi_delta", "value_head_dim": config.linear_head_dim}
            return block | {ours: getattr(config, theirs) for theirs, ours in _DELTA.items()} | {"mlp": mlp}
        block = {"type": "latent_attention", "out_bias": config.attention_bias}
        return block | {ours: getattr(config, theirs) for theirs, ours in _LATENT.items()} | {"mlp": mlp}

    def layer_blocks(self, config: ModelConfig) -> list[Any]:
        kinds = {"kimi_delta": KimiDeltaBlock, "latent_attention": LatentAttentionBlock}
        found, refusals = settings.layer_blocks(config, self.architecture, kinds, self.experts), Refusals()
        for key, block in settings.used_blocks(config):
            settings.refuse_other_wiring(f"model.blocks.{key}", block, self.architecture, refusals)
        refusals.check()
        return found

    def write_mixers(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        for block in reversed(layers):
            names = _DELTA if isinstance(block, KimiDeltaBlock) else _LATENT
            fields |= {theirs: getattr(block, ours) for theirs, ours in names.items()}
        if "num_attention_heads" in fields:
            fields["num_key_value_heads"] = fields["num_attention_heads"]
        return fields | {"layer_types": [LINEAR if isinstance(block, KimiDeltaBlock) else FULL for block in layers]}

    def mixer_weights(self, ours: str, theirs: str, block: Any, config: ModelConfig) -> list[Weight]:
        theirs = f"{theirs}.{self.mixer}"
        if isinstance(block, LatentAttentionBlock):
            return tensors.latent_attention_mixer(ours, theirs, block, config)
        d, heads, (keys, values), rank = config.d_model, block.n_heads, block.widths(), block.rank
        rows = {"q_proj": keys, "k_proj": keys, "v_proj": values, "b_proj": heads, "f_a_proj": rank, "g_a_proj": rank}
        kernels = zip(("q_conv1d", "k_conv1d", "v_conv1d"), (keys, keys, values), strict=True)
        parts = tuple(Part(f"{theirs}.{name}.weight", (n, 1, block.d_conv)) for name, n in kernels)
        return [
            *tensors.linear(f"{ours}.in_proj", {f"{theirs}.{name}": n for name, n in rows.items()}, d),
            # transformers saves the one that it has as three of equal size, whatever was loaded.
            Weight(f"{ours}.conv.weight", (2 * keys + values, block.d_conv), parts, cut_anywhere=True),
            *tensors.linear(f"{ours}.decay_proj", {f"{theirs}.f_b_proj": keys}, rank),
            Weight(f"{ours}.decay.A_log", (heads,), (Part(f"{theirs}.A_log", (1, 1, heads, 1)),)),
            tensors.same(f"{ours}.decay.dt_bias", f"{theirs}.dt_bias", keys),
            *tensors.linear(f"{ours}.gate_proj", {f"{theirs}.g_b_proj": values}, rank),
            tensors.same(f"{ours}.norm.weight", f"{theirs}.o_norm.weight", block.value_head_dim),
            *tensors.linear(f"{ours}.out_proj", {f"{theirs}.o_proj": d}, values),
        ]


class KimiLinear(ExpertLayers, KimiLayers):
    """Names of tensors are those of published files: transformers renames some as it loads, others as it saves; all are read."""

    dense = True
    kind = KimiLinearConfig
    number = "num_local_experts"
    shared_width = "n_shared_experts"
    router = BIASED_SIGMOID
    router_fields = SIGMOID_FIELDS
    aux_loss = None
    moe = "block_sparse_moe"
    expert_in = ("w1", "w3")
    expert_out = "w2"
    shared = "block_sparse_moe.shared_experts"

    def is_sparse(self, config: Any, layer: int) -> bool:
        return config.mlp_layer_types[layer] == "sparse"

    def read_model(self, config: Any, refusals: Refusals) -> dict[str, Any]:
        tied, instead = config.tie_word_embeddings, "the class has an output layer of its own all the same; set false"
        refusals.unless(not tied, "tie_word_embeddings", tied, instead)
        return super().read_model(config, refusals)

    def read_experts(self, config: Any, mlp: dict[str, Any]) -> dict[str, Any]:
        refusals, shared = Refusals(), config.n_shared_experts
        refusals.unless(bool(shared), "num_shared_experts", shared, "the class needs a number")
        refusals.check()
        return super().read_experts(config, mlp)

    def read_shared_width(self, config: Any) -> int:
        return config.n_shared_experts * config.moe_intermediate_size

    def write_shared_width(self, mlp: ExpertsSection, shared: MLPSection) -> dict[str, Any]:
        return {"n_shared_experts": max(shared.d_ff // mlp.d_ff, 1)}

    def write_fields(self, config: ModelConfig, layers: list[Any]) -> dict[str, Any]:
        sparse = (isinstance(block.mlp, ExpertsSection) for block in layers)
        return {"mlp_layer_types": ["sparse" if found else "dense" for found in sparse]}

    def weights(self, config: ModelConfig) -> list[Weight]:
        return [replace(weight, parts=tuple(map(_with_spelling, weight.parts))) for weight in super().weights(config)]


def _with_spelling(part: Part) -> Part:
    if part.name.endswith(tuple(_ATTENTION + name for name in _OF_GATE)):
        in_class = part.name.replace(_ATTENTION, _GATE)
        return replace(part, copies=(in_class,), in_memory=in_class)
    for one, other in ((_MOE, _MLP), (_MLP, _MOE)):
        if one in part.name:
            return replace(part, copies=(part.name.replace(one, other),), in_memory=part.name.replace(_MOE, _MLP))
    return part
