"""Nemotron-H against transformers' NemotronHForCausalLM: logits, every gradient, decoding, and back to the same bits."""

import random
from typing import Any

import pytest
from transformers import NemotronHConfig, NemotronHForCausalLM

from llmtrain.models.hf.family import UnsupportedModelError
from llmtrain.models.hf.nemotron_h import FAMILY
from tests.support import hf

# Of training and of fresh weights, and what the class derives or passes over.
OTHER = frozenset(
    {"attention_dropout", "time_step_limit", "time_step_max", "time_step_floor", "num_hidden_layers", "expand"}
)


def draw(rng: random.Random, i: int) -> dict[str, Any]:
    heads, head_dim, groups = rng.choice([2, 4, 8]), rng.choice([4, 8]), rng.choice([1, 2, 4])
    heads *= groups
    attention = rng.choice([1, 2, 4])
    mixers = rng.choices(["M", "M-", "*", "*-"], k=rng.randint(1, 3))
    return {
        "hidden_size": rng.choice([heads * head_dim // 2, 20]),
        "hybrid_override_pattern": "".join(rng.sample(["M-", "*", *mixers], 2 + len(mixers))),
        "intermediate_size": rng.choice([24, 40]),
        "num_attention_heads": attention,
        "num_key_value_heads": rng.choice([n for n in (1, 2, 4) if attention % n == 0]),
        "head_dim": rng.choice([4, 10]),
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": groups,
        "ssm_state_size": rng.choice([3, 8]),
        "conv_kernel": rng.choice([2, 4]),
        "chunk_size": rng.choice([4, 16]),
        "time_step_min": rng.choice([0.001, 0.3]),
        "time_step_max": rng.choice([0.1, 0.5]),
        "time_step_floor": rng.choice([1e-4, 1e-2]),
        "use_conv_bias": rng.random() < 0.5,
        "use_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "mlp_hidden_act": rng.choice(["relu2", "gelu"]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        "initializer_range": rng.choice([0.02, 0.05]),
        "pad_token_id": None,
    }


@pytest.mark.parametrize("case", hf.cases("nemotron_h", draw, NemotronHConfig))
def test_same_function_and_back(case):
    peer = hf.random_peer(case, NemotronHForCausalLM)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER)


def test_through_folders(tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained, by the names of the files, which begin with `backbone`."""
    (case,) = hf.cases("nemotron_h", draw, NemotronHConfig)[3].values
    peer = hf.random_peer(case, NemotronHForCausalLM)
    ours = hf.ours_from_folder(peer, tmp_path / "theirs")
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    hf.assert_export_loads(FAMILY, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "-M*"}, r"hybrid_override_pattern\[0\] = - \(mlp\): an MLP follows a mixer here"),
        ({"hybrid_override_pattern": "M--*"}, r"hybrid_override_pattern\[2\] = - \(mlp\)"),
        ({"hybrid_override_pattern": "ME*-"}, r"hybrid_override_pattern\[1\] = E \(moe\): routed experts are not here"),
        ({"hybrid_override_pattern": "MQ*-Z"}, r"hybrid_override_pattern = \['Q', 'Z'\]: a string of M \(Mamba-2\), "),
        ({"hybrid_override_pattern": 7}, r"hybrid_override_pattern = \[7\]: a string of M"),
        ({"hybrid_override_pattern": ""}, 'hybrid_override_pattern = "": a string of M'),
        ({"hybrid_override_pattern": None, "layers_block_type": ["mamba", "moe"]}, r"layers_block_type\[1\] = moe"),
        ({"hybrid_override_pattern": None}, r"layers_block_type, which is absent,\[1\] = moe"),
        ({"attention_bias": True}, "attention_bias = true: NemotronHForCausalLM passes over it"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true: NemotronHForCausalLM passes over it"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = silu"),
    ],
)
def test_refusals(change, message):
    published = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "hidden_size": 4096}
    given = {key: value for key, value in (published | change).items() if value is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        FAMILY.read_config(given)
