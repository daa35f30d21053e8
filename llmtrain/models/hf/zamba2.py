"""Zamba2 (Glorioso et al., arXiv:2411.15242) as transformers' Zamba2ForCausalLM.

Its shared blocks appear in the state dict once per use. The first use's names are taken; the others are copies.
With tie_word_embeddings: false, transformers 5 (5.23) unties the shared blocks too, which 4 did not: each use then has
a block of its own. Files in which these are equal are read; none is written where a block has several uses.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from transformers import Zamba2Config

from llmtrain.models.config import Mamba2Block, ModelConfig, SharedAttentionBlock
from llmtrain.models.hf import settings, tensors
from llmtrain.models.hf.differences import refuse_differences
from llmtrain.models.hf.family import Weight
from llmtrain.models.hf.settings import Refusals
from llmtrain.models.pattern import Layer, format_pattern

_GATED_NORM_EPS = 1e-5  # Zamba2MambaMixer's own, whatever rms_norm_eps
_ACTIVATIONS = {"gelu": "geglu", "silu": "swiglu", "swish": "swiglu"}
# time_step_min for "no lower limit": the class takes its logarithm, so it cannot be 0. fp32's smallest normal number is
# below any relevant value of softplus.
_NO_LIMIT = 2.0**-126


class Zamba2:
    """The Zamba2 family. time_step_min is both the lower limit of time steps and the start of their initial range, of which
    the latter is not written.

    Not read, because without effect on the outputs: attention_dropout, num_logits_to_keep, use_mamba_kernels,
    use_mem_eff_path. Not written: model.dropout and a_init_range, for which the class has no place.
    """

    architecture = "Zamba2ForCausalLM"
    model_type = "zamba2"

    def read_config(self, published: Mapping[str, Any]) -> dict[str, Any]:
        kinds = _layer_kinds(published)
        config = settings.parse(Zamba2Config, {**published, **({"layers_block_type": kinds} if kinds else {})})
        refusals = Refusals()
        _refuse_published(config, refusals)
        rotary = settings.read_rotary(config, refusals) if config.use_mem_rope else None
        refusals.check()

        mixer: dict[str, Any] = {
            "type": "mamba2",
            "d_state": config.mamba_d_state,
            "head_dim": config.mamba_headdim,
            "expand": config.mamba_expand,
            "n_groups": config.mamba_ngroups,
            "d_conv": config.mamba_d_conv,
            "chunk_size": config.chunk_size,
            "proj_bias": config.add_bias_linear,
            **({"dt_limit": (float(config.time_step_min), None)} if config.time_step_min > _NO_LIMIT else {}),
            **settings.read_dt_range(config),
        }
        if config.rms_norm_eps != _GATED_NORM_EPS:
            mixer["gated_norm_eps"] = _GATED_NORM_EPS
        blocks = {"m": mixer}
        uses = config.layers_block_type.count("hybrid")
        if uses:
            blocks["s"] = _read_shared(config, uses, rotary)
        stack = [Layer("m", "s" if kind == "hybrid" else None) for kind in config.layers_block_type]
        return settings.validate_section(
            {
                "vocab_size": config.vocab_size,
                "d_model": config.hidden_size,
                "max_seq_len": config.max_position_embeddings,
                "norm": {"type": "rmsnorm", "eps": config.rms_norm_eps},
                "tie_embeddings": config.tie_word_embeddings,
                "blocks": blocks,
                "layers": format_pattern(stack),
                **settings.read_init(config.initializer_range),
            }
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        block, refusals = self._blocks(config)[0], Refusals()
        key, shared = _shared_block(config, refusals)
        if shared is not None:
            self._refuse_shared(config, key, shared, refusals)
        settings.refuse_uneven_scans(config, self.architecture, refusals)
        refusals.check()
        kinds = ["hybrid" if layer.shared else "mamba" for layer in config.layer_list()]
        fields = {
            "vocab_size": config.vocab_size,
            "hidden_size": config.d_model,
            "num_hidden_layers": len(kinds),
            "max_position_embeddings": config.max_seq_len,
            "mamba_d_state": block.d_state,
            "mamba_d_conv": block.d_conv,
            "mamba_expand": block.inner_width(config.d_model) // config.d_model,
            "mamba_ngroups": block.n_groups,
            "n_mamba_heads": block.spec(config.d_model).n_heads,
            "mamba_headdim": block.head_dim,
            "chunk_size": block.chunk_size,
            "use_conv_bias": True,
            "add_bias_linear": block.proj_bias,
            "time_step_min": max(block.dt_limit[0] if block.dt_limit else 0.0, _NO_LIMIT),
            "time_step_max": block.dt_max,
            "time_step_floor": min(1e-4, block.dt_min),
            "rms_norm_eps": config.norm.eps,
            "initializer_range": config.init.std,
            "tie_word_embeddings": config.tie_embeddings,
            **(_write_shared(config, shared) if shared is not None else {}),
        }
        written = settings.class_config(Zamba2Config, self.architecture, {**fields, "layers_block_type": kinds})
        # As on the hub; transformers 5 renames `mamba` as it reads, and earlier ones do not know its new name.
        written |= {"layers_block_type": kinds}
        refuse_differences(config, self, written)
        return written

    def _refuse_shared(self, config: ModelConfig, key: str, shared: SharedAttentionBlock, refusals: Refusals) -> None:
        """Refuse what could not be written. What is written and means something else is found by reading it back."""
        name, unless, spec = self.architecture, refusals.unless, shared.spec(config.d_model)
        uses, tied = sum(layer.shared is not None for layer in config.layer_list()), config.tie_embeddings
        instead = f"{name} in transformers 5 then unties its shared blocks too; set tie_embeddings: true"
        unless(tied or shared.n_shared == uses, "model.tie_embeddings", tied, instead)
        rank, attn_rank = shared.adapter_rank, shared.attn_adapter_rank
        unless(rank is not None, f"{key}.adapter_rank", rank, f"{name} has adapters in every use; set a rank")
        wide = spec.n_heads * spec.head_dim == 2 * config.d_model and spec.n_kv_heads == spec.n_heads
        instead = f"{name} has these adapters only where queries, keys and values are 2 * d_model wide"
        unless(attn_rank is None or wide, f"{key}.attn_adapter_rank", attn_rank, instead)

    def _blocks(self, config: ModelConfig) -> list[Mamba2Block]:
        return settings.layer_blocks(config, self.architecture, {"mamba2": Mamba2Block}, shared=True)

    def weights(self, config: ModelConfig) -> list[Weight]:
        _, shared = _shared_block(config, Refusals())
        stack, blocks = config.layer_list(), self._blocks(config)
        hybrid = [i for i, layer in enumerate(stack) if layer.shared]
        made = [tensors.embedding(config, "model.embed_tokens.weight", "lm_head.weight")]
        if shared is not None:
            for copy in range(shared.n_shared):
                first, *others = (f"model.layers.{i}.shared_transformer." for i in hybrid[copy :: shared.n_shared])
                weights = _shared_weights(f"shared.{stack[hybrid[0]].shared}.{copy}", first, shared, config)
                made += tensors.also_under(weights, first, others)
        for i, layer in enumerate(stack):
            theirs = f"model.layers.{i}"
            if layer.shared and shared is not None:
                made += _use_weights(f"blocks.{i}.shared_input", hybrid, hybrid.index(i), shared, config)
                theirs += ".mamba_decoder"
            made.append(tensors.same(f"blocks.{i}.norm.weight", f"{theirs}.input_layernorm.weight", config.d_model))
            made += tensors.mamba2_mixer(f"blocks.{i}.mixer", f"{theirs}.mamba", blocks[i], config)
        made.append(tensors.same("norm.weight", "model.final_layernorm.weight", config.d_model))
        return made + tensors.head(config, "lm_head.weight")


def _shared_weights(ours: str, theirs: str, block: SharedAttentionBlock, config: ModelConfig) -> list[Weight]:
    d, d_ff, bias = config.d_model, block.mlp.d_ff, block.mlp.bias
    head_dim = block.spec(d).head_dim
    q, kv = block.n_heads * head_dim, block.kv_heads * head_dim
    attn, mlp = f"{theirs}self_attn", f"{theirs}feed_forward"
    return [
        tensors.same(f"{ours}.norm.weight", f"{theirs}input_layernorm.weight", 2 * d),
        *tensors.linear(f"{ours}.mixer.wqkv", {f"{attn}.q_proj": q, f"{attn}.k_proj": kv, f"{attn}.v_proj": kv}, 2 * d),
        *tensors.linear(f"{ours}.mixer.wo", {f"{attn}.o_proj": d}, q),
        tensors.same(f"{ours}.mlp_norm.weight", f"{theirs}pre_ff_layernorm.weight", d),
        *tensors.linear(f"{ours}.mlp.w_in", {f"{mlp}.gate_up_proj": 2 * d_ff}, d, bias),
        *tensors.linear(f"{ours}.mlp.w_out", {f"{mlp}.down_proj": d}, d_ff, bias),
    ]


def _use_weights(
    ours: str, hybrid: Sequence[int], use: int, block: SharedAttentionBlock, config: ModelConfig
) -> list[Weight]:
    """Weights of use number `use`. Its adapters are stored in the shared block, and again at every use of the same copy."""
    d, d_ff = config.d_model, block.mlp.d_ff
    first, *others = (f"model.layers.{i}.shared_transformer." for i in hybrid[use % block.n_shared :: block.n_shared])
    made: list[Weight] = []
    if (rank := block.attn_adapter_rank) is not None:
        lists = {x: f"{first}self_attn.linear_{x}_adapter_list.{use}" for x in "qkv"}
        made += tensors.linear(f"{ours}.qkv_adapter.down", {f"{name}.0": rank for name in lists.values()}, 2 * d)
        for x, name in lists.items():
            made += tensors.linear(f"{ours}.qkv_adapter.up_{x}", {f"{name}.1": 2 * d}, rank)
    if (rank := block.adapter_rank) is not None:
        name = f"{first}feed_forward.gate_up_proj_adapter_list.{use}"
        made += tensors.linear(f"{ours}.mlp_adapter.down", {f"{name}.0": rank}, d)
        made += tensors.linear(f"{ours}.mlp_adapter.up", {f"{name}.1": 2 * d_ff}, rank)
    made = tensors.also_under(made, first, others)
    return made + tensors.linear(f"{ours}.linear", {f"model.layers.{hybrid[use]}.linear": d}, d)


def _shared_block(config: ModelConfig, refusals: Refusals) -> tuple[str, SharedAttentionBlock | None]:
    names = list(dict.fromkeys(layer.shared for layer in config.layer_list() if layer.shared))
    if not names:
        return "", None
    instead = f"Zamba2ForCausalLM has one kind of shared block, not {' and '.join(names)}; n_shared makes copies"
    refusals.unless(len(names) == 1, "model.layers", config.layers, instead)
    block = config.blocks[names[0]]
    assert isinstance(block, SharedAttentionBlock)
    return f"model.blocks.{names[0]}", block


def _layer_kinds(published: Mapping[str, Any]) -> list[str] | None:
    """layers_block_type, made from hybrid_layer_ids where a file has only those; None leaves the class its default.

    Raises UnsupportedModelError when the two disagree, or either with num_hidden_layers.
    """
    kinds, hybrid = published.get("layers_block_type"), published.get("hybrid_layer_ids")
    if kinds is None and hybrid is not None and "num_hidden_layers" in published:
        kinds = ["hybrid" if i in hybrid else "mamba" for i in range(published["num_hidden_layers"])]
    if kinds is None:
        return None
    refusals = Refusals()
    unknown = sorted(set(kinds) - {"mamba", "linear_attention", "hybrid"})
    refusals.unless(not unknown, "layers_block_type", unknown, "there are mamba (linear_attention) and hybrid")
    found = [i for i, kind in enumerate(kinds) if kind == "hybrid"]
    refusals.unless(hybrid in (None, found), "hybrid_layer_ids", hybrid, f"layers_block_type says {found}")
    count = published.get("num_hidden_layers", len(kinds))
    refusals.unless(count == len(kinds), "num_hidden_layers", count, f"layers_block_type has {len(kinds)} layers")
    refusals.check()
    return kinds


def _refuse_published(config: Any, refusals: Refusals) -> None:
    unless = refusals.unless
    unless(config.hidden_act in _ACTIVATIONS, "hidden_act", config.hidden_act, "only gelu and silu")
    unless(
        not config.use_long_context,
        "use_long_context",
        True,
        "versions of transformers differ in what it means; set it to false, and rope_theta and max_position_embeddings to "
        "the values wanted",
    )
    unless(config.use_conv_bias, "use_conv_bias", False, "Zamba2ForCausalLM always has that bias; true is possible")
    limit = getattr(config, "time_step_limit", None)  # in many files, and passed over by the class
    limited = limit is not None and list(limit) not in ([0, math.inf], [config.time_step_min, math.inf])
    unless(not limited, "time_step_limit", limit, "Zamba2ForCausalLM has [time_step_min, Infinity] in its place")
    heads, head_dim, d = config.n_mamba_heads, config.mamba_headdim, config.hidden_size
    needed = f"times mamba_headdim ({head_dim}) must be mamba_expand * hidden_size"
    unless(head_dim * heads == config.mamba_expand * d, "n_mamba_heads", heads, needed)
    width = config.attention_hidden_size
    unless(width == 2 * d, "attention_hidden_size", width, f"must be 2 * hidden_size ({2 * d})")
    heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.attention_head_dim
    possible = not config.use_shared_attention_adapter or (kv_heads == heads and heads * head_dim == 2 * d)
    instead = "Zamba2ForCausalLM has these adapters only where queries, keys and values are 2 * hidden_size wide"
    unless(possible, "use_shared_attention_adapter", True, instead)


def _read_shared(config: Any, uses: int, rotary: dict[str, Any] | None) -> dict[str, Any]:
    shared: dict[str, Any] = {
        "type": "shared_attention",
        "n_heads": config.num_attention_heads,
        "n_shared": min(config.num_mem_blocks, uses),
        "mlp": {
            "type": _ACTIVATIONS[config.hidden_act],
            "d_ff": config.intermediate_size,
            "bias": config.add_bias_linear,
        },
        "adapter_rank": config.adapter_rank,
    }
    if config.use_shared_attention_adapter:
        shared["attn_adapter_rank"] = config.adapter_rank
    if config.num_key_value_heads != config.num_attention_heads:
        shared["n_kv_heads"] = config.num_key_value_heads
    if config.attention_head_dim * config.num_attention_heads != 2 * config.hidden_size:
        shared["head_dim"] = config.attention_head_dim
    if rotary is not None:
        shared["position"] = rotary
    return shared


def _write_shared(config: ModelConfig, shared: SharedAttentionBlock) -> dict[str, Any]:
    assert shared.adapter_rank is not None
    rotary = shared.position if shared.position.type == "rotary" else None
    return {
        "num_attention_heads": shared.n_heads,
        "num_key_value_heads": shared.kv_heads,
        "attention_head_dim": shared.spec(config.d_model).head_dim,
        "intermediate_size": shared.mlp.d_ff,
        "hidden_act": "gelu" if shared.mlp.type == "geglu" else "silu",
        "num_mem_blocks": shared.n_shared,
        "adapter_rank": shared.adapter_rank,
        "use_shared_attention_adapter": shared.attn_adapter_rank is not None,
        "use_mem_rope": rotary is not None,
        **(settings.write_rotary(rotary) if rotary is not None else {}),
    }
