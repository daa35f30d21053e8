"""Zamba2 against transformers' Zamba2ForCausalLM: logits, every gradient, and back to the same bits."""

import random
from typing import Any

import pytest
from transformers import Zamba2Config, Zamba2ForCausalLM

from llmtrain.models.hf.family import UnsupportedModelError
from llmtrain.models.hf.zamba2 import FAMILY
from tests.support import hf

# num_mem_blocks: more than there are uses mean as many as there are.
OTHER = frozenset(
    {"attention_dropout", "num_logits_to_keep", "use_mamba_kernels", "use_mem_eff_path", "kv_channels"}
    | {"num_query_groups", "rope_theta", "rope_scaling", "time_step_floor"}
)


def draw(rng: random.Random, i: int) -> dict[str, Any]:
    mamba_heads = rng.choice([2, 4])
    heads = rng.choice([1, 2, 4])
    adapters, rope = bool(i & 1), bool(i & 2)
    kinds = [rng.choice(["linear_attention", "hybrid"]) for _ in range(rng.randint(2, 5))]
    kinds[rng.randrange(len(kinds))] = "hybrid"
    scaling = rng.choice([{"rope_type": "default"}, {"rope_type": "linear", "factor": 2.0}])
    return {
        "hidden_size": rng.choice([16, 24]),
        "num_hidden_layers": len(kinds),
        "layers_block_type": kinds,
        "mamba_d_state": rng.choice([4, 8]),
        "mamba_d_conv": rng.choice([2, 3, 4]),
        "mamba_expand": rng.choice([1, 2]),
        "mamba_ngroups": rng.choice([1, 2]),
        "n_mamba_heads": mamba_heads,
        "chunk_size": rng.choice([8, 16]),
        "time_step_min": rng.choice([1e-3, 0.1, 0.5]),  # a limit as well: see test_hf_mamba2
        "time_step_max": rng.choice([0.6, 1.0]),
        "add_bias_linear": rng.random() < 0.3,
        "intermediate_size": rng.choice([20, 36]),
        "hidden_act": rng.choice(["gelu", "gelu", "silu"]),
        "num_attention_heads": heads,
        # The class has adapters for as many key and value heads as query heads only.
        "num_key_value_heads": heads if adapters else rng.choice([n for n in (1, 2, 4) if heads % n == 0]),
        "num_mem_blocks": rng.choice([n for n in (1, 2) if n <= kinds.count("hybrid")]),
        "use_shared_attention_adapter": adapters,
        "adapter_rank": rng.choice([2, 5]),
        "use_mem_rope": rope,
        **({"rope_parameters": {"rope_theta": rng.choice([100.0, 10_000.0]), **scaling}} if rope else {}),
        "time_step_floor": rng.choice([1e-4, 1e-3]),
        "initializer_range": rng.choice([0.02, 0.05]),
        "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.7,
        "max_position_embeddings": 128,
    }


def tie_shared_blocks(peer: Any) -> None:
    """With tie_word_embeddings: false, transformers 5.23 leaves the shared blocks untied as well; see models/hf/zamba2.py."""
    hybrid = [layer for layer in peer.model.layers if hasattr(layer, "shared_transformer")]
    for i, layer in enumerate(hybrid):
        layer.shared_transformer = hybrid[i % peer.config.num_mem_blocks].shared_transformer


def unties_shared_blocks(config: Any) -> bool:
    return not config.tie_word_embeddings and config.layers_block_type.count("hybrid") > config.num_mem_blocks


@pytest.mark.parametrize("case", hf.cases("zamba2", draw, Zamba2Config))
def test_same_function_and_back(case):
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    if unties_shared_blocks(case.config):
        with pytest.raises(UnsupportedModelError, match=r"tie_embeddings = false: .* set tie_embeddings: true"):
            FAMILY.write_config(ours.config)
    else:
        hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER)


@pytest.mark.parametrize("case", hf.cases("zamba2", draw, Zamba2Config)[:6])
def test_through_folders(case, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    # save_pretrained takes only those blocks for tied that the class ties: elsewhere it saves equal copies.
    as_made = Zamba2ForCausalLM(case.config)
    as_made.load_state_dict(peer.state_dict())
    ours = hf.ours_from_folder(as_made, tmp_path / "theirs", max_shard_size="8KB")
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    if not unties_shared_blocks(case.config):
        hf.assert_export_loads(FAMILY, ours, peer, case, tmp_path / "ours", OTHER)


def test_more_copies_than_uses():
    """The class makes only as many shared blocks as are used."""
    config = Zamba2Config(
        vocab_size=hf.VOCAB,
        hidden_size=16,
        num_hidden_layers=3,
        layers_block_type=["linear_attention", "hybrid", "hybrid"],
        n_mamba_heads=4,
        num_attention_heads=2,
        num_mem_blocks=5,
        adapter_rank=3,
    )
    case = hf.Case(config, 2, 9, seed=3)
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER | {"num_mem_blocks"})


def test_no_hybrid_layer():
    config = Zamba2Config(
        vocab_size=hf.VOCAB,
        hidden_size=32,
        num_hidden_layers=2,
        layers_block_type=["linear_attention"] * 2,
        n_mamba_heads=4,
    )
    case = hf.Case(config, 2, 9, seed=3)
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)


@pytest.mark.parametrize("case", hf.cases("zamba2", draw, Zamba2Config)[:8])
def test_padding_on_the_right(case):
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    assert hf.padding_apart(hf.ours_in_memory(peer), peer, case, "right") < hf.TOLERANCE


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("case", hf.cases("zamba2", draw, Zamba2Config)[:6])
def test_padding_on_the_left(case, biased):
    """With add_bias_linear the class is wrong, as Mamba2ForCausalLM is: see test_hf_mamba2."""
    case.config.add_bias_linear = biased
    peer = hf.random_peer(case, Zamba2ForCausalLM, tie_shared_blocks)
    apart = hf.padding_apart(hf.ours_in_memory(peer), peer, case, "left")
    assert apart > 1e-3 if biased else apart < hf.TOLERANCE
