"""Hybrids of attention and Mamba-2 against their classes in transformers: logits, every gradient, decoding, and back to the same
bits."""

import random
from typing import Any

import pytest
import transformers

from llmtrain.models.hf.family import UnsupportedModelError, family_of_hf_config
from tests.support import hf, ropes

Options = dict[str, Any]
# Keys of config.json that need not come back equal: of training, older spellings, and what a class derives or passes over.
OTHER = frozenset(
    {
        *("attention_dropout", "num_logits_to_keep", "rope_theta", "rope_scaling", "partial_rotary_factor", "head_dim"),
        *("mamba_expand", "intermediate_size", "num_experts_per_tok"),
    }
)


def common(rng: random.Random, i: int) -> Options:
    """Keys that all these classes have. Without limits of time steps in every third case: decoding there forgets about them."""
    heads = rng.choice([1, 2, 4])
    limits = [None, [0.05, 2.0], [0.01, float("inf")]]
    return {
        "hidden_size": heads * rng.choice([8, 16]),
        "intermediate_size": rng.choice([24, 40]),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "attention_bias": rng.random() < 0.5,
        "mamba_n_groups": rng.choice([1, 2]),
        "mamba_d_state": rng.choice([3, 8]),
        "mamba_d_conv": rng.choice([2, 4]),
        "mamba_chunk_size": rng.choice([4, 16]),
        "mamba_conv_bias": rng.random() < 0.5,
        "mamba_proj_bias": rng.random() < 0.5,
        "rms_norm_eps": rng.choice([1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "max_position_embeddings": 128,
        "initializer_range": rng.choice([0.02, 0.05]),
        "rope_parameters": ropes.draw(rng),
        "pad_token_id": None,  # the class learns nothing about that token
        **({"time_step_limit": limit} if i % 3 != 1 and (limit := rng.choice(limits)) else {}),
    }


def layers(rng: random.Random) -> list[str]:
    """Both kinds at least once."""
    kinds = ["mamba", "attention"]
    return rng.sample(more := [*kinds, *rng.choices(kinds, k=rng.randint(0, 2))], len(more))


def scan(rng: random.Random, keys: Options) -> Options:
    """Heads that are together `expand` times as wide as the stream."""
    expand, head_dim = rng.choice([1, 2, 3]), rng.choice([4, 2])
    heads = expand * keys["hidden_size"] // head_dim
    return {"mamba_expand": expand, "mamba_d_head": head_dim, "mamba_n_heads": heads}


def bamba(rng: random.Random, i: int) -> Options:
    keys, types = common(rng, i), layers(rng)
    part = rng.choice([{}, {"partial_rotary_factor": 1.0}])
    where = {"attn_layer_indices": [n for n, kind in enumerate(types) if kind == "attention"]}
    return keys | scan(rng, keys) | where | {
        "num_hidden_layers": len(types),
        "mlp_bias": rng.random() < 0.5,
        "rope_parameters": keys["rope_parameters"] | part,
    }  # fmt: skip


def granite(rng: random.Random, i: int) -> Options:
    keys, types = common(rng, i), layers(rng)
    factors = ("embedding_multiplier", "logits_scaling", "residual_multiplier", "attention_multiplier")
    return keys | scan(rng, keys) | {name: rng.choice([0.22, 1.5, 6.0]) for name in factors} | {
        "num_hidden_layers": len(types),
        "layer_types": types,
        "num_local_experts": 0,
        "shared_intermediate_size": rng.choice([24, 40]),
        **rng.choice([{"position_embedding_type": "rope"}, {"position_embedding_type": "nope", "rope_parameters": None}]),
    }  # fmt: skip


def falcon(rng: random.Random, i: int) -> Options:
    keys, groups = common(rng, i), rng.choice([1, 2])
    heads, head_dim, norm = groups * rng.choice([1, 3]), rng.choice([4, 8]), rng.random() < 0.5
    single = ("lm_head", "embedding", "key", "attention_in", "attention_out", "ssm_in", "ssm_out")
    return keys | {f"{name}_multiplier": rng.choice([0.3, 0.7071067811865476, 1.5]) for name in single} | {
        "num_hidden_layers": rng.randint(1, 3),
        "head_dim": rng.choice([4, 10]),
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_d_ssm": heads * head_dim,
        "mamba_rms_norm": norm,
        "mamba_norm_before_gate": norm and rng.random() < 0.5,
        "projectors_bias": keys["mamba_proj_bias"],
        "mlp_bias": rng.random() < 0.5,
        "mlp_multipliers": [rng.choice([0.4, 1.7]) for _ in range(2)],
        "ssm_multipliers": [rng.choice([0.4, 1.0, 1.7]) for _ in range(5)],
    }  # fmt: skip


PEERS = {
    "bamba": hf.Peer(bamba, transformers.BambaConfig, transformers.BambaForCausalLM),
    "granitemoehybrid": hf.Peer(granite, transformers.GraniteMoeHybridConfig, transformers.GraniteMoeHybridForCausalLM),
    "falcon_h1": hf.Peer(falcon, transformers.FalconH1Config, transformers.FalconH1ForCausalLM),
}


def case_of(name: str, number: int) -> hf.Case:
    return hf.random_case(name, PEERS[name].draw, PEERS[name].config, number)


@hf.every_case(PEERS)
def test_same_function_and_back(name, number):
    case = case_of(name, number)
    peer = hf.random_peer(case, PEERS[name].model)
    ours, family = hf.ours_in_memory(peer), family_of_hf_config({"model_type": name})
    hf.assert_same_function(family, ours, peer, case)
    hf.assert_back_is_equal(family, ours, peer, case, OTHER)


@pytest.mark.parametrize("name", PEERS)
def test_through_folders(name, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    case = case_of(name, 7)
    peer = hf.random_peer(case, PEERS[name].model)
    ours, family = hf.ours_from_folder(peer, tmp_path / "theirs"), family_of_hf_config({"model_type": name})
    hf.assert_export_loads(family, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "granitemoehybrid", "num_local_experts": 0, "hidden_act": "gelu"}, "hidden_act = gelu: only silu"),
        ({"model_type": "bamba", "hidden_act": "gelu"}, "hidden_act = gelu: only silu"),
        ({"model_type": "bamba", "mamba_n_heads": 100}, "does not accept .*mamba_n_heads"),
        ({"model_type": "falcon_h1", "projectors_bias": True}, r"projectors_bias = true: must be mamba_proj_bias .false"),
        ({"model_type": "falcon_h1", "ssm_in_multiplier": 0.0}, "input_multiplier: .*greater than 0"),
        ({"model_type": "falcon_h1", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_type = dynamic: .*length"),
        ({"model_type": "jamba", "mamba_dt_rank": 16, "num_experts": 16}, "needs what is not here: Mamba-1 layers"),
    ],
)  # fmt: skip
def test_refusals(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        family_of_hf_config(change).read_config(change)
