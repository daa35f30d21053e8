"""MPT against transformers' MptForCausalLM: logits, every gradient, and back to the same bits."""

import random
from typing import Any

import pytest
from transformers import MptConfig, MptForCausalLM
from transformers.models.mpt.modeling_mpt import MptModel, build_mpt_alibi_tensor

from llmtrain.models.hf.family import UnsupportedModelError
from llmtrain.models.hf.mpt import FAMILY
from tests.support import hf

OTHER = frozenset({"learned_pos_emb", "attn_config"})  # attn_config: see test_attention_section


def draw(rng: random.Random, i: int) -> dict[str, Any]:
    heads = [1, 2, 3, 4, 5, 6][i % 6]  # powers of two, and others, which have ALiBi slopes of their own
    return {
        "d_model": heads * rng.choice([4, 8]),
        "n_heads": heads,
        "n_layers": rng.randint(2, 4),
        "max_seq_len": rng.choice([64, 80]),
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.6,
        "initializer_range": rng.choice([0.02, 0.05]),
        "attn_config": {
            "clip_qkv": rng.choice([None, None, 0.5, 1.0]),
            "softmax_scale": rng.choice([None, 0.11, 0.7]),
        },
    }


@pytest.mark.parametrize("case", hf.cases("mpt", draw, MptConfig))
def test_same_function_and_back(case):
    peer = hf.random_peer(case, MptForCausalLM)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER)


def test_another_alibi_bias_max_is_read_as_it_was_trained(monkeypatch):
    """The class passes alibi_bias_max over; a file that has it was trained with it (by LLM Foundry)."""
    attention = {"alibi_bias_max": 16}
    config = MptConfig(vocab_size=hf.VOCAB, d_model=24, n_heads=3, n_layers=2, max_seq_len=64, attn_config=attention)
    case = hf.Case(config, 2, 21, seed=7)
    peer = hf.random_peer(case, MptForCausalLM)
    ours = hf.ours_in_memory(peer)
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) > 1e-3

    def as_trained(self, num_heads, sequence_length, alibi_bias_max=8, device=None):
        return build_mpt_alibi_tensor(num_heads, sequence_length, 16, device)

    monkeypatch.setattr(MptModel, "build_mpt_alibi_tensor", as_trained)
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    with pytest.raises(UnsupportedModelError, match="max_bias = 16"):
        FAMILY.write_config(ours.config)


@pytest.mark.parametrize("case", hf.cases("mpt", draw, MptConfig)[:6])
def test_attention_section(case):
    written = MptConfig.from_dict(FAMILY.write_config(hf.our_config(FAMILY, case.config))).attn_config
    for key in ("attn_type", "alibi", "alibi_bias_max", "clip_qkv", "softmax_scale", "qk_ln", "prefix_lm"):
        assert getattr(written, key) == getattr(case.config.attn_config, key), key


@pytest.mark.parametrize("case", hf.cases("mpt", draw, MptConfig)[:6])
def test_through_folders(case, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    peer = hf.random_peer(case, MptForCausalLM)
    ours = hf.ours_from_folder(peer, tmp_path / "theirs", max_shard_size="8KB")
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    hf.assert_export_loads(FAMILY, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("case", hf.cases("mpt", draw, MptConfig)[:6])
def test_padding(case, side):
    peer = hf.random_peer(case, MptForCausalLM)
    assert hf.padding_apart(hf.ours_in_memory(peer), peer, case, side) < hf.TOLERANCE
