"""Fields that change the function of a model: each is written and read back the same, or refused by name.

One field is changed at a time, on a model that the class does express. A field that is added to the config fails
here until someone says what other value it may have.
"""

import copy
import json
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import ValidationError

from llmtrain.models.config import (
    AttentionBlock,
    Block,
    Mamba2Block,
    ModelConfig,
    SharedAttentionBlock,
)
from llmtrain.models.hf.family import Family, UnsupportedModelError
from llmtrain.models.hf.llama import FAMILY as LLAMA
from llmtrain.models.hf.mamba2 import FAMILY as MAMBA2
from llmtrain.models.hf.mpt import FAMILY as MPT
from llmtrain.models.hf.zamba2 import FAMILY as ZAMBA2
from llmtrain.models.sections.layers import (
    AlibiPosition,
    LinearScaling,
    Llama3Scaling,
    MLPConfig,
    NormConfig,
    RotaryPosition,
)

ATTENTION: dict[str, Any] = {"type": "attention", "n_heads": 4}
MAMBA: dict[str, Any] = {"type": "mamba2", "d_state": 16, "head_dim": 8}
COMMON: dict[str, Any] = {"vocab_size": 64, "d_model": 32, "max_seq_len": 48, "dropout": 0.1, "init": {"std": 0.03}}
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
_POSITION = [{"type": "none"}, {"type": "alibi"}, {"type": "rotary", "theta": 77.0}]
_ATTENTION: dict[str, list[Any]] = {
    "n_heads": [2, 8],
    "n_kv_heads": [1, 2],
    "head_dim": [4, 10, 16],
    "position": _POSITION,
    "qk_norm": ["head", "full"],
    "clip_qkv": [3.0, None],
    "sliding_window": [5],
    "softcap": [9.0],
    "softmax_scale": [0.3],
    "qkv_bias": [True, False],
    "out_bias": [True, False],
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
        "logit_softcap": [30.0],
    },
    AttentionBlock: _ATTENTION | {"mlp": _MLP},
    SharedAttentionBlock: _ATTENTION
    | {"mlp": _MLP, "n_shared": [1, 3, 4], "adapter_rank": [3, None], "attn_adapter_rank": [3, None]},
    Mamba2Block: {
        "d_state": [8],
        "head_dim": [16],
        "expand": [3],
        "n_groups": [2],
        "d_conv": [3],
        "dt_limit": [(0.2, 0.5), (0.3, None), (0.0, None), None],
        "conv_bias": [False],
        "proj_bias": [True],
        "norm_before_gate": [True],
        "gated_norm_eps": [1e-3, 1e-5],
        "norm": _NORM,
        "mlp": _MLP,
    },
    NormConfig: {"type": ["rmsnorm", "layernorm"], "bias": [True], "eps": [1e-3]},
    MLPConfig: {"type": ["gelu", "swiglu", "geglu"], "d_ff": [44], "bias": [True, False]},
    AlibiPosition: {"max_bias": [4.0, 7.5]},
    RotaryPosition: {"theta": [500.0], "scaling": [None, {"type": "linear", "factor": 3.0}]},
    LinearScaling: {"factor": [7.0]},
    Llama3Scaling: {
        "factor": [7.0],
        "low_freq_factor": [2.0],
        "high_freq_factor": [5.0],
        "original_max_seq_len": [100],
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


def sections(config: ModelConfig) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The path and content of every section that computes."""
    pending: list[tuple[tuple[str, ...], Any]] = [((), config)]
    while pending:
        path, section = pending.pop()
        yield path, section
        for name in type(section).model_fields:
            value = getattr(section, name)
            if name == "blocks":
                pending += [((*path, name, block), content) for block, content in value.items()]
            elif hasattr(type(value), "model_fields") and name not in NO_FUNCTION:
                pending.append(((*path, name), value))


def changes() -> Iterator[Any]:
    for name, (_, base) in BASES.items():
        for path, section in sections(ModelConfig.model_validate(base)):
            for key, values in OTHER_VALUES.get(type(section), {}).items():
                for value in values:
                    yield pytest.param(name, (*path, key), value, id=f"{name}-{'.'.join((*path, key))}={value}")


def changed(base: dict[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    made = copy.deepcopy(base)
    section = made
    for key in path[:-1]:
        section = section.setdefault(key, {})
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
        if isinstance(block, Mamba2Block):
            fields["gated_norm_eps"] = block.gated_norm_eps or norm.eps
            fields["dt_limit"] = None if block.dt_limit == (0.0, None) else block.dt_limit
        else:
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
    norm = config.norm.model_dump() | {"backend": "reference"}
    for block in config.blocks:
        assert family.write_config(ModelConfig.model_validate(changed(base, ("blocks", block, "norm"), norm)))


@pytest.mark.parametrize("name", BASES)
def test_the_bases_are_expressed(name):
    family, base = BASES[name]
    config = ModelConfig.model_validate(base)
    written = json.loads(json.dumps(family.write_config(config)))
    assert function(ModelConfig.model_validate(family.read_config(written))) == function(config)


def valid(name: str, path: tuple[str, ...], value: Any) -> bool:
    try:
        ModelConfig.model_validate(changed(BASES[name][1], path, value))
    except ValidationError:
        return False
    return True


@pytest.mark.parametrize("name, path, value", [change for change in changes() if valid(*change.values)])
def test_a_change_is_expressed_or_refused(name, path, value):
    family, base = BASES[name]
    config = ModelConfig.model_validate(changed(base, path, value))
    written, reasons = None, ()
    try:
        written = json.loads(json.dumps(family.write_config(config)))
    except UnsupportedModelError as error:
        reasons = error.reasons
    if written is None:
        assert reasons and all(reason.startswith("model.") and ": " in reason for reason in reasons)
        return
    assert function(ModelConfig.model_validate(family.read_config(written))) == function(config)


def test_every_field_has_other_values():
    for section, values in OTHER_VALUES.items():
        assert values.keys() == section.model_fields.keys() - NO_FUNCTION - ({"type"} - values.keys()), section


def test_fields_of_training_are_kept_where_there_is_a_place():
    for name, (family, base) in BASES.items():
        read = ModelConfig.model_validate(family.read_config(family.write_config(ModelConfig.model_validate(base))))
        assert read.init.std == 0.03
        assert read.dropout == (0.1 if name == "mpt" else 0.0)
    mixer = {"chunk_size": 32, "dt_min": 0.01, "dt_max": 0.2}
    config = ModelConfig.model_validate(changed(BASES["mamba2"][1], ("blocks", "x"), MAMBA | mixer))
    found = MAMBA2.read_config(MAMBA2.write_config(config))["blocks"]["m"]
    assert {key: found[key] for key in mixer} == mixer


def test_blocks_of_several_names_must_be_alike():
    _, base = BASES["llama"]
    block = base["blocks"]["x"]
    twice = base | {"blocks": {"x": block, "y": block | {"backend": "reference"}}, "layers": "x y"}
    assert LLAMA.write_config(ModelConfig.model_validate(twice))["num_hidden_layers"] == 2
    unlike = twice | {"blocks": {"x": block, "y": block | {"n_kv_heads": 1}}}
    with pytest.raises(UnsupportedModelError, match=r"model\.blocks\.y = unlike x in n_kv_heads"):
        LLAMA.write_config(ModelConfig.model_validate(unlike))
