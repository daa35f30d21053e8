"""Fields that change the function of a model: each is written and read back the same, or refused by name.

One field is changed at a time, on a model that the class does express. A field that is added to the config fails
here until someone says what other value it may have.
"""

import contextlib
import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from llmtrain.models.config import (
    AttentionBlock,
    Block,
    GatedDeltaNetBlock,
    KimiDeltaBlock,
    Mamba2Block,
    ModelConfig,
    ParallelMixersBlock,
    SharedAttentionBlock,
)
from llmtrain.models.hf.family import Family, UnsupportedModelError, family_of_hf_config
from llmtrain.models.hf.llama import FAMILY as LLAMA
from llmtrain.models.hf.mamba2 import FAMILY as MAMBA2
from llmtrain.models.hf.mpt import FAMILY as MPT
from llmtrain.models.hf.zamba2 import FAMILY as ZAMBA2
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.layers import (
    AlibiPosition,
    LinearScaling,
    Llama3Scaling,
    NormConfig,
    RotaryPosition,
    YarnScaling,
)

ATTENTION: dict[str, Any] = {"type": "attention", "n_heads": 4}
MAMBA: dict[str, Any] = {"type": "mamba2", "d_state": 16, "head_dim": 8}
COMMON: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "max_seq_len": 48, "dropout": 0.1, "init": {"std": 0.03}}
ROTARY, SWIGLU = {"type": "rotary"}, {"type": "swiglu", "d_ff": 48}
AFTER: dict[str, Any] = {"type": "rmsnorm", "place": "after"}
GEMMA: dict[str, Any] = {
    "norm": {"type": "rmsnorm", "zero_centered": True, "place": "both"},
    "embedding_multiplier": 32**0.5,
    "logit_softcap": 20.0,
}
ATTENTION_MLP = ATTENTION | {"position": ROTARY, "mlp": SWIGLU}
FURTHER, LOCAL = {"type": "rotary", "theta": 500.0}, {"sliding_window": 9}
GELU = {"type": "gelu_tanh", "d_ff": 48, "bias": True}
GDN: dict[str, Any] = {"type": "gated_deltanet", "n_heads": 4, "key_head_dim": 6, "value_head_dim": 10, "mlp": SWIGLU}
BIASED = ATTENTION_MLP | {"qkv_bias": True, "out_bias": True, "mlp": GELU}
GEGLU = ATTENTION_MLP | {"softmax_scale": 0.5, "mlp": {"type": "geglu_tanh", "d_ff": 48}}


def one(block: dict[str, Any], **model: Any) -> dict[str, Any]:
    return {"blocks": {"x": block}, "layers": "x*3", **model}


DECODERS: dict[str, dict[str, Any]] = {
    "mistral": one(ATTENTION_MLP | {"n_kv_heads": 2, "head_dim": 6} | LOCAL),
    "qwen2": {
        "blocks": {"x": ATTENTION_MLP | {"qkv_bias": True}, "y": ATTENTION_MLP | {"qkv_bias": True} | LOCAL},
        "layers": "x*2 y",
    },
    "qwen3": one(ATTENTION_MLP | {"qk_norm": "head"}),
    "olmo2": one(ATTENTION_MLP | {"qk_norm": "full"}, norm=AFTER),
    "olmo3": {
        "blocks": {
            "x": ATTENTION_MLP | {"qk_norm": "full", "position": FURTHER},
            "y": ATTENTION_MLP | {"qk_norm": "full"} | LOCAL,
        },
        "layers": "y*3 x",
        "norm": AFTER,
    },
    "phi3": one(ATTENTION_MLP | {"position": ROTARY | {"fraction": 0.75}}),
    "granite": one(
        ATTENTION_MLP | {"softmax_scale": 0.25, "residual_multiplier": 0.22},
        embedding_multiplier=12.0,
        logit_multiplier=1 / 49,
    ),
    "gpt_neox": one(BIASED | {"parallel": True}, norm={"type": "layernorm", "bias": True}),
    "starcoder2": one(BIASED, norm={"type": "layernorm", "bias": True}),
    "nemotron_h": {
        "blocks": {
            "x": MAMBA | {"dt_limit": (0.01, None), "n_groups": 2, "mlp": {"type": "relu2", "d_ff": 48}},
            "y": ATTENTION | {"n_kv_heads": 2, "mlp": {"type": "relu2", "d_ff": 48}},
            "z": MAMBA | {"dt_limit": (0.01, None), "n_groups": 2},
        },
        "layers": "x z y x",
        "tie_embeddings": False,
    },
    "bamba": {
        "blocks": {
            "x": MAMBA | {"dt_limit": (0.01, None), "n_groups": 2, "mlp": SWIGLU},
            "y": ATTENTION_MLP | {"n_kv_heads": 2, "position": ROTARY | {"fraction": 0.5}},
        },
        "layers": "x y x",
    },
    "granitemoehybrid": {
        "blocks": {
            "x": MAMBA | {"residual_multiplier": 0.22, "mlp": SWIGLU},
            "y": ATTENTION | {"softmax_scale": 0.25, "residual_multiplier": 0.22, "mlp": SWIGLU},
        },
        "layers": "x y x",
        "embedding_multiplier": 12.0,
        "logit_multiplier": 1 / 49,
    },
    "falcon_h1": one(
        {
            "type": "parallel_mixers",
            "mixers": [
                MAMBA | {"d_inner": 48, "gated_norm": False, "input_multiplier": 1.25, "residual_multiplier": 0.24},
                ATTENTION | {"n_kv_heads": 2, "position": ROTARY, "softmax_scale": 0.1, "input_multiplier": 0.5},
            ],
            "mlp": SWIGLU | {"activation_multiplier": 0.88, "out_multiplier": 0.59},
        },
        embedding_multiplier=5.6,
        logit_multiplier=0.04,
    ),
    "qwen3_next": {
        "blocks": {
            "x": GDN | {"n_key_heads": 2},
            "y": ATTENTION_MLP
            | {
                "n_kv_heads": 2,
                "head_dim": 12,
                "qk_norm": "head",
                "output_gate": True,
                "position": ROTARY | {"fraction": 0.5},
            },
        },
        "layers": "x*2 y",
        "norm": {"type": "rmsnorm", "zero_centered": True},
    },
    "olmo_hybrid": {
        "blocks": {
            "x": GDN | {"negative_eigenvalues": True, "gated_norm_eps": 1e-5},
            "y": ATTENTION_MLP | {"qk_norm": "full", "position": {"type": "none"}, "norm": AFTER | {"eps": 1e-6}},
        },
        "layers": "x*2 y",
        "norm": {"type": "rmsnorm", "eps": 1e-6},
    },
    "gemma2": {"blocks": {"x": GEGLU | {"softcap": 9.0}, "y": GEGLU | {"softcap": 9.0} | LOCAL}, "layers": "y x"}
    | GEMMA,
    "gemma3_text": {
        "blocks": {"x": GEGLU | {"qk_norm": "head", "position": FURTHER}, "y": GEGLU | {"qk_norm": "head"} | LOCAL},
        "layers": "y*5 x",
        **GEMMA,
    },
}
BASES: dict[str, tuple[Family, dict[str, Any]]] = {
    "mpt": (
        MPT,
        COMMON
        | {
            "norm": {"type": "layernorm"},
            "blocks": {
                "x": ATTENTION | {"position": {"type": "alibi"}, "clip_qkv": 2.0, "mlp": {"type": "gelu", "d_ff": 128}}
            },
            "layers": "x*3",
        },
    ),
    "llama": (
        LLAMA,
        COMMON
        | {
            "blocks": {
                "x": ATTENTION
                | {
                    "n_kv_heads": 2,
                    "position": {"type": "rotary", "scaling": {"type": "llama3", "factor": 4.0}},
                    "mlp": {"type": "swiglu", "d_ff": 48},
                }
            },
            "layers": "x*3",
        },
    ),
    "llama-linear": (
        LLAMA,
        COMMON
        | {
            "blocks": {
                "x": ATTENTION
                | {
                    "position": {"type": "rotary", "scaling": {"type": "linear", "factor": 4.0}},
                    "qkv_bias": True,
                    "out_bias": True,
                    "mlp": {"type": "swiglu", "d_ff": 48, "bias": True},
                }
            },
            "layers": "x*3",
        },
    ),
    **{name: (family_of_hf_config({"model_type": name}), COMMON | base) for name, base in DECODERS.items()},
    "mamba2": (MAMBA2, COMMON | {"blocks": {"x": MAMBA | {"dt_limit": (0.01, 2.0)}}, "layers": "x*3"}),
    "zamba2": (
        ZAMBA2,
        COMMON
        | {
            "blocks": {
                "x": MAMBA | {"dt_limit": (0.01, None)},
                "s": {
                    "type": "shared_attention",
                    "n_heads": 4,
                    "n_shared": 2,
                    "position": {"type": "rotary"},
                    "mlp": {"type": "geglu", "d_ff": 48},
                    "adapter_rank": 4,
                    "attn_adapter_rank": 4,
                },
            },
            "layers": "x (s+x x)*3",
        },
    ),
}

_MLP = [{"type": "swiglu", "d_ff": 40}, {"type": "gelu", "d_ff": 40}, None]
_NORM = [{"type": "rmsnorm", "eps": 1e-3}, {"type": "layernorm", "bias": True}, {"type": "layernorm", "eps": 1e-3}]
_YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}
_POSITION = [{"type": "none"}, {"type": "alibi"}, {"type": "rotary", "theta": 77.0}]
_ATTENTION: dict[str, list[Any]] = {
    "n_heads": [2, 8],
    "n_kv_heads": [1, 2],
    "head_dim": [4, 10, 16],
    "position": _POSITION,
    "qk_norm": ["none", "head", "full"],
    "clip_qkv": [3.0, None],
    "sliding_window": [5, None],
    "softcap": [8.0, None],
    "softmax_scale": [0.3, None],
    "parallel": [True, False],
    "residual_multiplier": [0.5, 1.0],
    "input_multiplier": [0.5, 1.0],
    "residual_scaling": [True],
    "qkv_bias": [True, False],
    "out_bias": [True, False],
    "output_gate": [True, False],
    "sinks": [True, False],
    "norm": _NORM,
}
# Section -> field -> other values. What is in NO_FUNCTION needs none.
OTHER_VALUES: dict[type, dict[str, list[Any]]] = {
    ModelConfig: {
        "vocab_size": [80],
        "d_model": [64],
        "max_seq_len": [20],
        "layers": ["x*2", "x*3", "s+x x", "(s+x)*2", "x*6 s+x s+x"],
        "positions": ["learned"],
        "norm": _NORM,
        "tie_embeddings": [False],
        "logit_softcap": [30.0, None],
        "embedding_multiplier": [3.0, 1.0],
        "logit_multiplier": [0.3, 1.0],
        "embedding_scaling": [True],
    },
    AttentionBlock: _ATTENTION | {"mlp": _MLP},
    SharedAttentionBlock: _ATTENTION
    | {"mlp": _MLP, "n_shared": [1, 3, 4], "adapter_rank": [3, None], "attn_adapter_rank": [3, None]},
    Mamba2Block: {
        "d_state": [8],
        "head_dim": [16],
        "expand": [3],
        "d_inner": [40, 96],
        "projection_multipliers": [(0.5, 1.0, 2.0, 1.0, 1.0)],
        "gated_norm": [False, True],
        "n_groups": [2],
        "d_conv": [3],
        "dt_limit": [(0.2, 0.5), (0.3, None), (0.0, None), None],
        "conv_bias": [False],
        "proj_bias": [True],
        "norm_before_gate": [True],
        "gated_norm_eps": [1e-3, 1e-5],
        "norm": _NORM,
        "mlp": _MLP,
        "parallel": [False],
        "residual_multiplier": [0.5],
        "input_multiplier": [0.5, 1.0],
        "residual_scaling": [True],
    },
    ParallelMixersBlock: {
        "mixers": [[ATTENTION, ATTENTION], [MAMBA, MAMBA], [MAMBA, ATTENTION | {"position": ROTARY}, MAMBA]],
        "norm": _NORM,
        "mlp": _MLP,
        "parallel": [True],
        "residual_multiplier": [0.5],
        "input_multiplier": [0.5],
        "residual_scaling": [True],
    },
    GatedDeltaNetBlock: {
        "n_heads": [8],
        "n_key_heads": [1, 4],
        "key_head_dim": [7],
        "value_head_dim": [6],
        "d_conv": [3],
        "negative_eigenvalues": [True, False],
        "gated_norm_eps": [1e-3, None],
        "norm": _NORM,
        "mlp": _MLP,
        "parallel": [True],
        "residual_multiplier": [0.5],
        "input_multiplier": [0.5],
        "residual_scaling": [True],
    },
    NormConfig: {
        "type": ["rmsnorm", "layernorm"],
        "bias": [True, False],
        "eps": [1e-3],
        "zero_centered": [True, False],
        "place": ["before", "after", "both"],
    },
    MLPSection: {
        "type": ["gelu", "gelu_tanh", "relu2", "xielu", "swiglu", "geglu", "geglu_tanh"],
        "d_ff": [44],
        "bias": [True, False],
        "activation_multiplier": [0.5, 1.0],
        "out_multiplier": [0.5, 1.0],
    },
    AlibiPosition: {"max_bias": [4.0, 7.5]},
    RotaryPosition: {
        "theta": [600.0],
        "fraction": [0.5, 1.0],
        "scaling": [None, {"type": "linear", "factor": 3.0}, _YARN],
    },
    LinearScaling: {"factor": [7.0]},
    Llama3Scaling: {
        "factor": [7.0],
        "low_freq_factor": [2.0],
        "high_freq_factor": [5.0],
        "original_max_seq_len": [100],
    },
    YarnScaling: {
        "factor": [7.0],
        "original_max_seq_len": [100],
        "beta_fast": [4.0],
        "beta_slow": [2.0],
        "truncate": [False],
        "attention_factor": [1.5],
    },
}
NO_FUNCTION = {
    "init",
    "dropout",
    "blocks",  # gone into
    "backend",
    "chunk_size",
    "dt_min",
    "dt_max",
    "a_init_range",
}


def sections(config: ModelConfig) -> Iterator[tuple[tuple[Any, ...], Any]]:
    """The path and content of every section that computes."""
    pending: list[tuple[tuple[Any, ...], Any]] = [((), config)]
    while pending:
        path, section = pending.pop()
        yield path, section
        for name in type(section).model_fields:
            value = getattr(section, name)
            if name == "blocks":
                pending += [((*path, name, block), content) for block, content in value.items()]
            elif name == "mixers":
                pending += [((*path, name, i), content) for i, content in enumerate(value)]
            elif hasattr(type(value), "model_fields") and name not in NO_FUNCTION:
                pending.append(((*path, name), value))


def changes(base: dict[str, Any]) -> Iterator[tuple[str, ModelConfig]]:
    """Every valid model that differs from `base` in one field, with what was changed."""
    for path, section in sections(ModelConfig.model_validate(base)):
        for key, values in OTHER_VALUES.get(type(section), {}).items():
            for value in values:
                with contextlib.suppress(ValidationError):
                    made = ModelConfig.model_validate(changed(base, (*path, key), value))
                    yield f"{'.'.join(map(str, (*path, key)))}={value}", made


def changed(base: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made: dict[str, Any] = copy.deepcopy(base)
    section: Any = made
    for key in path[:-1]:
        section = section[key] if isinstance(section, list) else section.setdefault(key, {})
    section[path[-1]] = value
    return made


def function(config: ModelConfig) -> dict[str, Any]:
    """Canonical form of a model's function, whatever its blocks are called and whichever defaults are spelt out."""

    def of(block: Block | None) -> dict[str, Any] | None:
        if block is None:
            return None
        norm = block.norm or config.norm
        fields = {key: value for key, value in block.model_dump().items() if key not in NO_FUNCTION}
        fields["norm"] = norm.model_dump()
        if isinstance(block, ParallelMixersBlock):
            fields["mixers"] = sorted((of(part.model_copy(update={"norm": norm})) for part in block.mixers), key=str)
        elif isinstance(block, Mamba2Block):
            fields["gated_norm_eps"] = (block.gated_norm_eps or norm.eps) if block.gated_norm else None
            fields["norm_before_gate"] = block.gated_norm and block.norm_before_gate
            fields["dt_limit"] = None if block.dt_limit == (0.0, None) else block.dt_limit
            fields["d_inner"] = block.inner_width(config.d_model)
            del fields["expand"]
        elif isinstance(block, GatedDeltaNetBlock | KimiDeltaBlock):
            fields |= {"gated_norm_eps": block.gated_norm_eps or norm.eps, "n_key_heads": block.key_heads}
        elif isinstance(block, AttentionBlock | SharedAttentionBlock):
            spec = block.spec(config.d_model)
            fields |= {"n_kv_heads": spec.n_kv_heads, "head_dim": spec.head_dim, "softmax_scale": spec.scale}
        return fields

    made = {key: value for key, value in config.model_dump().items() if key not in NO_FUNCTION}
    made["layers"] = [
        (of(config.blocks[layer.block]), of(config.blocks[layer.shared]) if layer.shared else None)
        for layer in config.layer_list()
    ]
    if not any("mamba2" not in str(block) for block, _ in made["layers"]) and not any(s for _, s in made["layers"]):
        made["max_seq_len"] = None  # Mamba-2 alone has no place for it, and learned positions are refused
    return made


@pytest.mark.parametrize("name", BASES)
def test_a_block_whose_norm_differs_in_its_backend_alone_is_expressed(name):
    family, base = BASES[name]
    config = ModelConfig.model_validate(base)
    for block, section in config.blocks.items():
        norm = (section.norm or config.norm).model_dump() | {"backend": "reference"}
        assert family.write_config(ModelConfig.model_validate(changed(base, ("blocks", block, "norm"), norm)))


@pytest.mark.parametrize("name", BASES)
def test_the_bases_are_expressed(name):
    family, base = BASES[name]
    config = ModelConfig.model_validate(base)
    written = json.loads(json.dumps(family.write_config(config)))
    assert function(ModelConfig.model_validate(family.read_config(written))) == function(config)


@pytest.mark.parametrize("name", BASES)
def test_a_change_is_expressed_or_refused(name):
    family, base = BASES[name]
    for change, config in changes(base):
        try:
            written = json.loads(json.dumps(family.write_config(config)))
        except UnsupportedModelError as error:
            reasons = error.reasons
            assert reasons and all(one.startswith("model.") and ": " in one for one in reasons), (change, reasons)
        else:
            assert function(ModelConfig.model_validate(family.read_config(written))) == function(config), change


def test_every_field_has_other_values():
    for section, values in OTHER_VALUES.items():
        assert values.keys() == section.model_fields.keys() - NO_FUNCTION - ({"type"} - values.keys()), section


def test_fields_of_training_are_kept_where_there_is_a_place():
    for name, (family, base) in BASES.items():
        read = ModelConfig.model_validate(family.read_config(family.write_config(ModelConfig.model_validate(base))))
        assert read.init.std == 0.03
        assert read.dropout == (0.1 if name in ("mpt", "gpt_neox") else 0.0)
    mixer = {"chunk_size": 32, "dt_min": 0.01, "dt_max": 0.2}
    config = ModelConfig.model_validate(changed(BASES["mamba2"][1], ("blocks", "x"), MAMBA | mixer))
    found = MAMBA2.read_config(MAMBA2.write_config(config))["blocks"]["m"]
    assert {key: found[key] for key in mixer} == mixer


def test_a_refusal_names_the_blocks_own_setting():
    """norm_before_gate is the mixer's, whatever norm the block takes from the model."""
    family, base = BASES["granitemoehybrid"]
    name = next(name for name, block in base["blocks"].items() if block["type"] == "mamba2")
    config = ModelConfig.model_validate(changed(base, ("blocks", name, "norm_before_gate"), True))
    with pytest.raises(UnsupportedModelError, match=rf"^model\.blocks\.{name}\.norm_before_gate = true"):
        family.write_config(config)


def test_blocks_of_several_names_must_be_alike():
    _, base = BASES["mpt"]
    block = base["blocks"]["x"]
    twice = base | {"blocks": {"x": block, "y": block | {"backend": "reference"}}, "layers": "x y"}
    assert MPT.write_config(ModelConfig.model_validate(twice))["n_layers"] == 2
    unlike = twice | {"blocks": {"x": block, "y": block | {"clip_qkv": 1.0}}}
    with pytest.raises(
        UnsupportedModelError, match=r"^model\.blocks\.y\.clip_qkv = 1.0: .* has 2.0; set clip_qkv: 2.0$"
    ):
        MPT.write_config(ModelConfig.model_validate(unlike))
