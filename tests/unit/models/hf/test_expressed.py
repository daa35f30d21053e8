"""Fields that change the function of a model: each is written and read back the same, or refused by name.

One field is changed at a time, on a model that the class does express. A field that is added to the config fails
here until someone says what other value it may have.
"""

import contextlib
import copy
import functools
import json
import re
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
from llmtrain.models.hf.family import UnsupportedModelError
from llmtrain.models.hf.mamba2 import Mamba2
from llmtrain.models.hf.mpt import Mpt
from llmtrain.models.pattern import Layer, format_pattern, parse_pattern
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.layers import (
    AlibiPosition,
    LinearScaling,
    Llama3Scaling,
    NormConfig,
    RotaryPosition,
    YarnScaling,
)
from tests.support import hf, hf_families

ATTENTION: dict[str, Any] = {"type": "attention", "n_heads": 4}
MAMBA: dict[str, Any] = {"type": "mamba2", "d_state": 16, "head_dim": 8}
ROTARY = {"type": "rotary"}
QUICK = {
    *(
        "llama",
        "mpt",
        "mamba2",
        "nemotron_h",
        "zamba2",
        "bamba",
        "granitemoehybrid",
        "falcon_h1",
        "qwen3_next",
        "olmo_hybrid",
    ),
    *("qwen2", "olmo3", "phi3", "granite", "gpt_neox", "starcoder2", "gemma2", "gemma3_text"),
}


@functools.cache
def drawn(name: str) -> dict[str, Any]:
    """A `model` section that the family expresses, whose first block is x: of a random config of its class."""
    peer = hf_families.PEERS[name]
    section = peer.family.read_config(hf.published_config(peer.case(5).config))
    first, *others = section["blocks"]
    names = {first: "x"} | {other: other for other in others}
    layers = [Layer(names[one.block], one.shared and names[one.shared]) for one in parse_pattern(section["layers"])]
    blocks = {names[block]: content for block, content in section["blocks"].items()}
    return section | {"blocks": blocks, "layers": format_pattern(layers), "dropout": 0.1, "init": {"std": 0.03}}


BASES = [name for name in hf_families.PEERS if not name.endswith("experts")]
EVERY_BASE = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.ci] * (name not in QUICK)) for name in BASES]
)


_MLP = [{"type": "swiglu", "d_ff": 40}, {"type": "gelu", "d_ff": 40}, None]
_NORM = [{"type": "rmsnorm", "eps": 1e-3}, {"type": "layernorm", "bias": True}, {"type": "layernorm", "eps": 1e-3}]
_YARN = {"type": "yarn", "factor": 4.0, "original_max_seq_len": 16}
_POSITION = [{"type": "none"}, {"type": "alibi"}, {"type": "rotary", "theta": 77.0}]
_AROUND: dict[str, list[Any]] = {
    "norm": _NORM,
    "mlp": _MLP,
    "parallel": [True, False],
    "residual_multiplier": [0.5, 1.0],
    "input_multiplier": [0.5, 1.0],
    "residual_scaling": [True],
}
"""Of every block that has a mixer."""
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
    **_AROUND,
    "qkv_bias": [True, False],
    "out_bias": [True, False],
    "output_gate": [True, False],
    "sinks": [True, False],
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
    AttentionBlock: _ATTENTION,
    SharedAttentionBlock: _ATTENTION
    | {"n_shared": [1, 3, 4], "adapter_rank": [3, None], "attn_adapter_rank": [3, None]},
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
        **_AROUND,
    },
    ParallelMixersBlock: {
        "mixers": [[ATTENTION, ATTENTION], [MAMBA, MAMBA], [MAMBA, ATTENTION | {"position": ROTARY}, MAMBA]],
        **_AROUND,
    },
    GatedDeltaNetBlock: {
        "n_heads": [8],
        "n_key_heads": [1, 4],
        "key_head_dim": [7],
        "value_head_dim": [6],
        "d_conv": [3],
        "negative_eigenvalues": [True, False],
        "gated_norm_eps": [1e-3, None],
        **_AROUND,
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


@EVERY_BASE
def test_a_block_whose_norm_differs_in_its_backend_alone_is_expressed(name):
    family, base = hf_families.PEERS[name].family, drawn(name)
    config = ModelConfig.model_validate(base)
    for block, section in config.blocks.items():
        norm = (section.norm or config.norm).model_dump() | {"backend": "reference"}
        assert family.write_config(ModelConfig.model_validate(changed(base, ("blocks", block, "norm"), norm)))


@EVERY_BASE
def test_the_bases_are_expressed(name):
    family, base = hf_families.PEERS[name].family, drawn(name)
    config = ModelConfig.model_validate(base)
    written = json.loads(json.dumps(family.write_config(config)))
    assert function(ModelConfig.model_validate(family.read_config(written))) == function(config)


@EVERY_BASE
def test_a_change_is_expressed_or_refused(name):
    family, base = hf_families.PEERS[name].family, drawn(name)
    for change, config in changes(base):
        try:
            written = json.loads(json.dumps(family.write_config(config)))
        except UnsupportedModelError as error:
            reasons = error.reasons
            assert reasons and all(re.match(r"model\.\S+ = .*: |model: ", one) for one in reasons), (change, reasons)
        else:
            assert function(ModelConfig.model_validate(family.read_config(written))) == function(config), change


def test_every_field_has_other_values():
    for section, values in OTHER_VALUES.items():
        assert values.keys() == section.model_fields.keys() - NO_FUNCTION - ({"type"} - values.keys()), section


def test_fields_of_training_are_kept_where_there_is_a_place():
    for name in BASES:
        family = hf_families.PEERS[name].family
        read = ModelConfig.model_validate(
            family.read_config(family.write_config(ModelConfig.model_validate(drawn(name))))
        )
        assert read.init.std == 0.03
        assert read.dropout == (0.1 if name in ("mpt", "gpt_neox") else 0.0)
    mixer = {"chunk_size": 32, "dt_min": 0.01, "dt_max": 0.2}
    config = ModelConfig.model_validate(changed(drawn("mamba2"), ("blocks", "x"), MAMBA | mixer))
    found = Mamba2().read_config(Mamba2().write_config(config))["blocks"]["m"]
    assert {key: found[key] for key in mixer} == mixer


def test_a_refusal_names_the_blocks_own_setting():
    """norm_before_gate is the mixer's, whatever norm the block takes from the model."""
    family, base = hf_families.PEERS["granitemoehybrid"].family, drawn("granitemoehybrid")
    name = next(name for name, block in base["blocks"].items() if block["type"] == "mamba2")
    config = ModelConfig.model_validate(changed(base, ("blocks", name, "norm_before_gate"), True))
    with pytest.raises(UnsupportedModelError, match=rf"^model\.blocks\.{name}\.norm_before_gate = true"):
        family.write_config(config)


def test_blocks_of_several_names_must_be_alike():
    base = drawn("mpt")
    block = base["blocks"]["x"] | {"clip_qkv": 2.0}
    twice = base | {"blocks": {"x": block, "y": block | {"backend": "reference"}}, "layers": "x y"}
    assert Mpt().write_config(ModelConfig.model_validate(twice))["n_layers"] == 2
    unlike = twice | {"blocks": {"x": block, "y": block | {"clip_qkv": 1.0}}}
    with pytest.raises(
        UnsupportedModelError, match=r"^model\.blocks\.y\.clip_qkv = 1.0: .* has 2.0; set clip_qkv: 2.0$"
    ):
        Mpt().write_config(ModelConfig.model_validate(unlike))
