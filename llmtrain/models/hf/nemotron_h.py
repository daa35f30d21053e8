"""Nemotron-H (arXiv:2504.03624) as transformers' NemotronHForCausalLM: Mamba-2 and attention without positions, some of them
with an MLP or experts behind."""

from collections.abc import Mapping
from typing import Any

from transformers import NemotronHConfig

from llmtrain.models.config import AttentionBlock, Mamba2Block, ModelConfig
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.experts import BIASED_SIGMOID, SIGMOID_FIELDS
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import FULL, LINEAR, Refusals
from llmtrain.models.pattern import Layer, format_pattern
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.experts import ExpertsSection

_BEHIND = {"mlp": "_mlp", "moe": "_experts"}
"""Types of layers that join the mixer before them, and the end of the name of the block that they make with it."""
_PATTERN = "hybrid_override_pattern"
_NAMES = {LINEAR: "mamba", FULL: "attn"}
_LETTERS = {"mamba2": "M", "attention": "*"}
_FIELDS = {
    "ssm_state_size": "d_state",
    "mamba_head_dim": "head_dim",
    "n_groups": "n_groups",
    "conv_kernel": "d_conv",
    "chunk_size": "chunk_size",
    "use_conv_bias": "conv_bias",
    "use_bias": "proj_bias",
}
"""Fields of NemotronHConfig, and those of our Mamba-2 block that they are."""
_NO_LIMIT = 1e-30
"""time_step_min for a block without lower limit: the class always clamps to it."""


class NemotronH:
    """The class counts an MLP, or experts, as a layer of its own; here it is the `mlp` of the block before it.

    Experts (Nemotron 3) have DeepSeek-V3's router, and in some models fewer channels than the stream (moe_latent_size).

    Not read, because without effect on the outputs: mamba_proj_bias, hidden_dropout, residual_in_fp32, time_step_limit (the
    class has [time_step_min, Infinity]). Not written: model.dropout, a_init_range.
    """

    architecture = "NemotronHForCausalLM"
    model_type = "nemotron_h"

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        _refuse_letters(published)
        config = settings.parse(NemotronHConfig, published)
        refusals = Refusals()
        blocks = {
            "mamba": _read_mamba(config, refusals),
            "attn": {
                "type": "attention",
                "n_heads": config.num_attention_heads,
                "n_kv_heads": config.num_key_value_heads,
                "head_dim": config.head_dim,
            },
        }
        for key in ("attention_bias", "sliding_window", "num_nextn_predict_layers", "tie_word_embeddings"):
            found = getattr(config, key)
            refusals.unless(not found, key, found, f"{self.architecture} passes over it")
        layers = _read_layers(config.layers_block_type, *_layers_key(published), refusals)
        kind = settings.read_mlp(config, "mlp_hidden_act", refusals, gated=False)
        refusals.check()
        mlp = {"type": kind, "d_ff": config.intermediate_size, "bias": config.mlp_bias}
        behind = {"_mlp": mlp, "_experts": _read_experts(config, kind)}
        blocks |= {name + end: block | {"mlp": mlp} for name, block in blocks.items() for end, mlp in behind.items()}
        return settings.validate_section(
            {
                "vocab_size": config.vocab_size,
                "d_model": config.hidden_size,
                "max_seq_len": config.max_position_embeddings,
                "norm": {"type": "rmsnorm", "eps": config.layer_norm_epsilon},
                "tie_embeddings": False,
                "blocks": {name: blocks[name] for name in dict.fromkeys(layers)},
                "layers": format_pattern([Layer(name) for name in layers]),
                **settings.read_init(config.initializer_range),
            }
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        blocks = self._blocks(config)
        pattern = "".join(_LETTERS[block.type] + _letter(block.mlp) for block in blocks)
        fields = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "max_position_embeddings": config.max_seq_len,
            _PATTERN: pattern,
            "layer_norm_epsilon": config.norm.eps,
            "initializer_range": config.init.std,
            "tie_word_embeddings": False,
        }
        for block in reversed(blocks):
            if isinstance(block.mlp, ExpertsSection):
                fields |= _write_experts(block.mlp)
            elif block.mlp is not None:
                activation = settings.write_mlp(block.mlp.type, gated=False)
                fields |= {
                    "intermediate_size": block.mlp.d_ff,
                    "mlp_hidden_act": activation,
                    "mlp_bias": block.mlp.bias,
                }
            if isinstance(block, AttentionBlock):
                fields |= {"num_attention_heads": block.n_heads, "num_key_value_heads": block.kv_heads}
                fields["head_dim"] = block.spec(config.d_model).head_dim
            else:
                low = block.dt_limit[0] if block.dt_limit else 0.0
                fields |= {theirs: getattr(block, ours) for theirs, ours in _FIELDS.items()}
                fields["mamba_num_heads"] = block.spec(config.d_model).n_heads
                # The class passes over it, as long as it is positive.
                fields["expand"] = max(block.inner_width(config.d_model) // config.d_model, 1)
                fields |= {"time_step_min": max(low, _NO_LIMIT), "time_step_max": block.dt_max}
                fields["time_step_floor"] = min(1e-4, block.dt_min)
        written = settings.class_config(NemotronHConfig, self.architecture, fields)
        written["num_hidden_layers"] = len(pattern)
        refuse_differences(config, self, written)
        return written

    def _blocks(self, config: ModelConfig) -> list[Mamba2Block | AttentionBlock]:
        kinds = {"mamba2": Mamba2Block, "attention": AttentionBlock}
        return settings.layer_blocks(config, self.architecture, kinds, experts=True)

    def weights(self, config: ModelConfig) -> list[Weight]:
        d, at = config.d_model, 0
        made = [tensors.embedding(config, "backbone.embeddings.weight", "lm_head.weight")]
        for i, block in enumerate(self._blocks(config)):
            ours, theirs = f"blocks.{i}", f"backbone.layers.{at}"
            made.append(tensors.same(f"{ours}.norm.weight", f"{theirs}.norm.weight", d))
            mixer = tensors.mamba2_mixer if isinstance(block, Mamba2Block) else tensors.attention_mixer
            made += mixer(f"{ours}.mixer", f"{theirs}.mixer", block, config)  # type: ignore[arg-type]
            if block.mlp is not None:
                at += 1
                theirs = f"backbone.layers.{at}"
                made.append(tensors.same(f"{ours}.mlp_norm.weight", f"{theirs}.norm.weight", d))
                made += _feed_forward(f"{ours}.mlp", f"{theirs}.mixer", block.mlp, d)
            at += 1
        made.append(tensors.same("norm.weight", "backbone.norm_f.weight", d))
        made += tensors.head(config, "lm_head.weight")
        return tensors.also_spelt(made, "backbone.", "model.")


def _read_experts(config: Any, activation: str) -> dict[str, Any]:
    shared = {"type": activation, "d_ff": config.moe_shared_expert_intermediate_size, "bias": config.mlp_bias}
    return {
        "type": "experts",
        "n_experts": config.n_routed_experts,
        "top_k": config.num_experts_per_tok,
        "d_ff": config.moe_intermediate_size,
        "activation": activation,
        "latent": config.moe_latent_size,
        "router": BIASED_SIGMOID | {ours: getattr(config, theirs) for theirs, ours in SIGMOID_FIELDS.items()},
        "shared": shared,
        "balance": {"weight": 0.0},
    }


def _write_experts(mlp: ExpertsSection) -> dict[str, Any]:
    shared = mlp.shared and {"moe_shared_expert_intermediate_size": mlp.shared.d_ff, "mlp_bias": mlp.shared.bias}
    return {
        "mlp_hidden_act": settings.write_mlp(mlp.activation, gated=False),
        "n_routed_experts": mlp.n_experts,
        "num_experts_per_tok": mlp.top_k,
        "moe_intermediate_size": mlp.d_ff,
        "moe_latent_size": mlp.latent,
        **{theirs: getattr(mlp.router, ours) for theirs, ours in SIGMOID_FIELDS.items()},
        **(shared or {}),
    }


def _letter(mlp: MLPSection | ExpertsSection | None) -> str:
    return "" if mlp is None else "E" if isinstance(mlp, ExpertsSection) else "-"


def _feed_forward(ours: str, theirs: str, mlp: MLPSection | ExpertsSection, d: int) -> list[Weight]:
    if isinstance(mlp, MLPSection):
        made = tensors.linear(f"{ours}.w_in", {f"{theirs}.up_proj": mlp.d_ff}, d, mlp.bias)
        return made + tensors.linear(f"{ours}.w_out", {f"{theirs}.down_proj": d}, mlp.d_ff, mlp.bias)
    made = tensors.experts(ours, theirs, mlp, d, matrices_in=("up_proj",))
    if mlp.latent is not None:
        made.insert(2, tensors.same(f"{ours}.latent_in.weight", f"{theirs}.fc1_latent_proj.weight", mlp.latent, d))
        made.append(tensors.same(f"{ours}.latent_out.weight", f"{theirs}.fc2_latent_proj.weight", d, mlp.latent))
    return (
        made
        if mlp.shared is None
        else made + _feed_forward(f"{ours}.shared", f"{theirs}.shared_experts", mlp.shared, d)
    )


def _layers_key(published: Mapping[str, Any]) -> tuple[str, str]:
    """The key that gives the layers, and what stands in it for each: words, or letters of a string."""
    written = [key for key in ("layer_types", "layers_block_type", _PATTERN) if published.get(key) is not None]
    key = written[0] if written else "layers_block_type, which is absent,"
    return key, published[_PATTERN] if key == _PATTERN else ""


def _refuse_letters(published: Mapping[str, Any]) -> None:
    """Refuse a pattern that the class cannot read, about which it says no more than the letter."""
    key, refusals = _layers_key(published)[0], Refusals()
    if key == _PATTERN:
        pattern = published[_PATTERN]
        others = sorted(set(pattern) - set("M*-E")) if isinstance(pattern, str) else [pattern]
        refusals.unless(
            bool(pattern) and not others,
            key,
            others or '""',
            "a string of M (Mamba-2), * (attention), - (MLP) and E (experts)",
        )
    refusals.check()


def _read_layers(types: list[str], key: str, letters: str, refusals: Refusals) -> list[str]:
    """Names of blocks for the types of layers, of which an MLP joins the one before. key, letters: see _layers_key."""
    layers: list[str] = []
    for i, kind in enumerate(types):
        joins = kind in _BEHIND and bool(layers) and layers[-1] in _NAMES.values()
        if joins:
            layers[-1] += _BEHIND[kind]
        elif kind in _NAMES:
            layers.append(_NAMES[kind])
        else:
            instead = f"{'an MLP' if kind == 'mlp' else 'a layer of experts'} follows a mixer here"
            found = f"{letters[i]} ({kind})" if letters else kind
            refusals.unless(False, f"{key}[{i}]", found, instead)
    return layers


def _read_mamba(config: Any, refusals: Refusals) -> dict[str, Any]:
    act = config.mamba_hidden_act
    refusals.unless(act in ("silu", "swish"), "mamba_hidden_act", act, "only silu")
    limited = config.time_step_min > _NO_LIMIT
    return {
        "type": "mamba2",
        **settings.read_inner_width(config.mamba_num_heads * config.mamba_head_dim, config.hidden_size),
        **{ours: getattr(config, theirs) for theirs, ours in _FIELDS.items()},
        **({"dt_limit": (float(config.time_step_min), None)} if limited else {}),
        **settings.read_dt_range(config),
    }
