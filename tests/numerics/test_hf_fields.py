"""Every field of every family's config class: drawn by the tests against that class, read, refused by its name, or shown to have
no part in what the class computes. A field that a later version of transformers adds fails here."""

import copy
import dataclasses
import json
import random
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from llmtrain.models.hf.family import UnsupportedModelError, families, family_of_hf_config
from tests.support import hf, hf_families
from tests.support.closeness import rounding

# Model type -> how its tests draw, its config class and its model class. Of those that may have no experts: in every other case.
PEERS: dict[str, tuple[Any, Any, Any]] = {}
for peer in hf_families.PEERS.values():
    draws = [other.draw for other in hf_families.PEERS.values() if other.model_type == peer.model_type]
    drawing = lambda rng, i, draws=draws: draws[i % len(draws)](rng, i)  # noqa: E731
    PEERS[peer.model_type] = drawing, peer.config, peer.model

# Fields of PreTrainedConfig: of tasks and of what a call returns.
OF_ALL = {
    *("architectures", "chunk_size_feed_forward", "dtype", "id2label", "is_encoder_decoder", "label2id"),
    *("output_hidden_states", "problem_type", "return_dict", "transformers_version"),
}
OF_CALLS = {"output_router_logits"}  # without experts the classes fail where it is true

# Fields that change nothing in the outputs -> another value; of all families, and of some.
_NO_PART: dict[str, Any] = {
    "use_cache": False,
    "pad_token_id": 5,
    "bos_token_id": 3,
    "eos_token_id": 4,
    "attention_dropout": 0.3,
    "num_logits_to_keep": 3,
}
# Of models without experts:
_ROUTER = {"num_experts_per_tok": 1, "norm_topk_prob": False, "router_aux_loss_coef": 0.5}
NO_PART: dict[str, dict[str, Any]] = {
    "llama": {"pretraining_tp": 2},
    "phi3": {"resid_pdrop": 0.2, "embd_pdrop": 0.2, "original_max_position_embeddings": 64},
    "gpt_neox": {"classifier_dropout": 0.2, "is_decoder": True},
    "starcoder2": {"residual_dropout": 0.2, "embedding_dropout": 0.2},
    "mpt": {
        "use_cache": True,
        "resid_pdrop": 0.2,
        "emb_pdrop": 0.2,
        "learned_pos_emb": False,
        "init_device": "meta",
        "embedding_fraction": 0.5,
    },
    "mamba2": {"residual_in_fp32": False, "rescale_prenorm_residual": True, "time_step_rank": 7},
    "zamba2": {"use_mamba_kernels": False, "use_mem_eff_path": True},
    "nemotron_h": _ROUTER
    | {
        "use_mamba_kernels": False,
        "mamba_proj_bias": True,
        "mamba_ssm_cache_dtype": "bfloat16",
        "expand": 5,
        "time_step_limit": (0.5, 0.6),
        "n_routed_experts": 4,
        "n_shared_experts": 2,
        "moe_intermediate_size": 24,
        "moe_shared_expert_intermediate_size": 24,
        "moe_latent_size": 8,
        "moe_shared_expert_overlap": False,
        "routed_scaling_factor": 2.0,
        "n_group": 2,
        "topk_group": 2,
        "mtp_layers_block_type": ["moe"],
        "residual_in_fp32": True,
        "hidden_dropout": 0.2,
        "rescale_prenorm_residual": False,
    },
    "kimi_linear": {"pretraining_tp": 2},
    "dots1": {"max_window_layers": 1},
    "gpt_oss": {"hidden_act": "gelu"},
    "smollm3": {"no_rope_layer_interval": 7},
    "seed_oss": {"pretraining_tp": 2},
    "glm4_moe": {"num_mtp_layers": 3},
    "deepseek_v2": {"pretraining_tp": 2, "norm_topk_prob": True},
    "deepseek_v3": {"pretraining_tp": 2, "num_mtp_layers": 3},
    "bamba": {"z_loss_coefficient": 0.1},
    "granitemoehybrid": _ROUTER | {"intermediate_size": 44},
    "falcon_h1": {"mamba_expand": 5},
    "qwen3_next": _ROUTER | {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 24},
    "olmo_hybrid": {"linear_dt_init_floor": 1e-3},
}

# Fields that the tests do not draw, and a value by which another model is read.
READ = {"vocab_size": 67, "max_position_embeddings": 96}

# Fields that are refused where they have this value.
REFUSED: dict[str, dict[str, Any]] = {
    "mpt": {"expansion_ratio": 2, "no_bias": False, "logit_scale": 0.5, "norm_type": "rmsnorm"},
    "olmoe": {"clip_qkv": 5.0},
    "deepseek_v2": {"num_key_value_heads": 7},
    "deepseek_v3": {"num_key_value_heads": 7, "rope_interleave": False},
    "zaya": {"lm_head_bias": True},
    "gpt_oss": {"swiglu_alpha": 1.5, "swiglu_limit": 5.0},
    "gemma2": {"use_bidirectional_attention": True},
    "gemma3_text": {"use_bidirectional_attention": True, "attn_logit_softcapping": 5.0},
    "mamba2": {"hidden_act": "gelu"},
    "zamba2": {"use_conv_bias": False, "use_long_context": True},
    "bamba": {"hidden_act": "gelu"},
    "granitemoehybrid": {"hidden_act": "gelu"},
    "falcon_h1": {"hidden_act": "gelu"},
    "qwen3_next": {"hidden_act": "gelu"},
    "olmo_hybrid": {"hidden_act": "gelu"},
    "kimi_linear": {"hidden_act": "gelu", "tie_word_embeddings": True},
    "nemotron_h": {
        "mamba_hidden_act": "gelu",
        "attention_bias": True,
        "sliding_window": 4,
        "num_nextn_predict_layers": 1,
        "tie_word_embeddings": True,
    },
}

# Fields for which the class itself takes one value alone.
OF_ONE_VALUE = {"zaya": {"num_experts_per_tok"}}


def fields(name: str) -> set[str]:
    """Fields of a class beyond PreTrainedConfig's."""
    found = {field.name for field in dataclasses.fields(PEERS[name][1])}
    return found - OF_ALL - OF_CALLS - OF_ONE_VALUE.get(name, set())


def of(name: str, table: dict[str, dict[str, Any]], common: dict[str, Any] | None = None) -> dict[str, Any]:
    found = (common or {}) | table.get(name, {})
    shared = {*(common or {}), *_ROUTER}
    return {key: value for key, value in found.items() if key in fields(name) or key not in shared}


def example(name: str) -> Any:
    draw, config, _ = PEERS[name]
    return config(vocab_size=hf.VOCAB, **draw(random.Random(f"{hf.SEED} {name}"), 0))


def drawn(name: str) -> set[str]:
    """Fields that have at least two values among many cases."""
    draw, config, _ = PEERS[name]
    found: dict[str, set[str]] = {key: set() for key in fields(name)}
    for i in range(hf.CASES):
        made = config(vocab_size=hf.VOCAB, **draw(random.Random(f"{hf.SEED} {name} {i}"), i))
        for key, values in found.items():
            values.add(json.dumps(getattr(made, key), default=str))
    return {key for key, values in found.items() if len(values) > 1}


def changed(config: Any, key: str, value: Any) -> dict[str, Any]:
    """config.json with another value of a field."""
    published = hf.published_config(config)
    spelt = config.attribute_map.get(key, key)
    return published | {spelt if spelt in published else key: value}


def test_every_family_is_here():
    assert PEERS.keys() == {family.model_type for family in families()}
    assert {field.name for field in dataclasses.fields(PreTrainedConfig)} == OF_ALL


@pytest.mark.parametrize("name", PEERS)
def test_every_field_is_drawn_read_refused_or_has_no_part(name):
    known = drawn(name) | of(name, {}, READ).keys() | of(name, REFUSED).keys() | of(name, NO_PART, _NO_PART).keys()
    assert fields(name) - known == set()
    assert known - fields(name) == set()


@pytest.mark.parametrize("name", PEERS)
def test_fields_that_are_not_drawn_are_read(name):
    family, config = family_of_hf_config({"model_type": name}), example(name)
    plain = family.read_config(hf.published_config(config))
    for key, value in of(name, {}, READ).items():
        assert family.read_config(changed(config, key, value)) != plain, key


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in REFUSED for key in REFUSED[name]])
def test_refused_by_name(name, key):
    with pytest.raises(UnsupportedModelError, match=rf"\b{key} = "):
        family_of_hf_config({"model_type": name}).read_config(changed(example(name), key, REFUSED[name][key]))


@pytest.mark.parametrize("name", PEERS)
def test_fields_without_a_part_change_nothing_there_and_here(name):
    model = PEERS[name][2]
    family, config = family_of_hf_config({"model_type": name}), example(name)
    peer = hf.random_peer(hf.Case(config, 2, 9, seed=5), model)
    tokens = torch.randint(6, hf.VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
    plain = _function(family.read_config(hf.published_config(config)))
    with torch.no_grad():
        theirs = hf.logits_of(peer, tokens)
        nearly = rounding(theirs.abs().max().item(), config.hidden_size)
        for key, value in of(name, NO_PART, _NO_PART).items():
            assert getattr(config, key) != value, key
            other = copy.deepcopy(config)
            setattr(other, key, value)
            assert _function(family.read_config(changed(config, key, value))) == plain, key
            fresh = model._from_config(other, attn_implementation="eager").float().eval()
            fresh.load_state_dict(peer.state_dict(), strict=True)
            # Its tensors lie elsewhere in memory, by which a matrix product may sum in another order.
            torch.testing.assert_close(hf.logits_of(fresh, tokens), theirs, rtol=0, atol=nearly, msg=key)


def _function(section: dict[str, Any]) -> dict[str, Any]:
    """A `model` section without what is of training and of fresh weights alone."""
    return {key: value for key, value in section.items() if key not in ("dropout", "init")}
