"""Llama against transformers' LlamaForCausalLM: logits, every gradient, and back to the same bits."""

import random
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from llmtrain.models.hf.llama import FAMILY
from tests.support import hf

OTHER = frozenset({"attention_dropout", "pretraining_tp"})


def draw(rng: random.Random, i: int) -> dict[str, Any]:
    heads = rng.choice([1, 2, 3, 4, 6])
    d_model = heads * rng.choice([4, 6, 8])
    rope: dict[str, Any] = {"rope_theta": rng.choice([100.0, 10_000.0, 500_000.0])}
    match i % 3:
        case 0:
            rope["rope_type"] = "default"
        case 1:
            rope |= {"rope_type": "linear", "factor": rng.choice([1.5, 4.0])}
        case 2:
            # So short that every band of frequencies is met.
            rope |= {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            rope["original_max_position_embeddings"] = rng.choice([16, 64])
            rope["rope_theta"] = rng.choice([10.0, 100.0])
    return {
        "hidden_size": d_model,
        "intermediate_size": rng.choice([24, 40, 52]),
        "num_hidden_layers": rng.randint(2, 4),
        "num_attention_heads": heads,
        "num_key_value_heads": rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        "head_dim": rng.choice([None, 4, 10, 16]),
        "rope_parameters": rope,
        "rms_norm_eps": rng.choice([1e-6, 1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.5,
        "attention_bias": rng.random() < 0.5,
        "mlp_bias": rng.random() < 0.5,
        "max_position_embeddings": 128,
        "initializer_range": rng.choice([0.02, 0.05]),
        "hidden_act": rng.choice(["silu", "silu", "gelu", "gelu_pytorch_tanh"]),
    }


@pytest.mark.parametrize("case", hf.cases("llama", draw, LlamaConfig))
def test_same_function_and_back(case):
    peer = hf.random_peer(case, LlamaForCausalLM)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER)


@pytest.mark.parametrize("case", hf.cases("llama", draw, LlamaConfig)[:6])
def test_through_folders(case, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    peer = hf.random_peer(case, LlamaForCausalLM)
    ours = hf.ours_from_folder(peer, tmp_path / "theirs", max_shard_size="8KB")
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    hf.assert_export_loads(FAMILY, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", hf.cases("llama", draw, LlamaConfig)[:6])
def test_padding(case, side):
    peer = hf.random_peer(case, LlamaForCausalLM)
    assert hf.padding_apart(hf.ours_in_memory(peer), peer, case, side) < hf.TOLERANCE
