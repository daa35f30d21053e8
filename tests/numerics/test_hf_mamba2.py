"""Mamba-2 against transformers' Mamba2ForCausalLM: logits, every gradient, and back to the same bits."""

import json
import math
import random
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Mamba2Config, Mamba2ForCausalLM

from llmtrain.kernels import platform
from llmtrain.models.hf.load import load_hf
from llmtrain.models.hf.mamba2 import FAMILY
from tests.support import hf

OTHER = frozenset({"residual_in_fp32", "rescale_prenorm_residual", "time_step_rank", "time_step_floor"})


def draw(rng: random.Random, i: int) -> dict[str, Any]:
    groups = [1, 2, 3][i % 3]
    head_dim, expand = rng.choice([4, 8]), rng.choice([1, 2, 3])
    heads = groups * expand * rng.choice([1, 2])  # so that d_model comes out whole
    return {
        "hidden_size": heads * head_dim // expand,
        "num_heads": heads,
        "head_dim": head_dim,
        "expand": expand,
        "n_groups": groups,
        "state_size": rng.choice([4, 8, 12]),
        "num_hidden_layers": rng.randint(2, 4),
        "conv_kernel": rng.choice([2, 3, 4]),
        "chunk_size": rng.choice([8, 16]),
        "use_bias": rng.random() < 0.3,
        "use_conv_bias": rng.random() < 0.6,
        "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
        # Initial steps in these tests are about softplus(-3..1) = 0.05..1.3, so that these limits are met.
        "time_step_limit": rng.choice([(0.0, math.inf), (0.1, math.inf), (0.0, 0.4), (0.1, 0.5)]),
        "time_step_min": rng.choice([1e-3, 1e-2]),
        "time_step_max": rng.choice([0.1, 0.3]),
        "time_step_floor": rng.choice([1e-4, 1e-3]),
        "tie_word_embeddings": rng.random() < 0.6,
        "initializer_range": rng.choice([0.1, 0.05]),
    }


@pytest.mark.parametrize("case", hf.cases("mamba2", draw, Mamba2Config))
def test_same_function_and_back(case):
    peer = hf.random_peer(case, Mamba2ForCausalLM)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(FAMILY, ours, peer, case)
    hf.assert_back_is_equal(FAMILY, ours, peer, case, OTHER)


@pytest.mark.parametrize("case", hf.cases("mamba2", draw, Mamba2Config)[:6])
def test_through_folders(case, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained."""
    peer = hf.random_peer(case, Mamba2ForCausalLM)
    ours = hf.ours_from_folder(peer, tmp_path / "theirs", max_shard_size="8KB")
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    hf.assert_export_loads(FAMILY, ours, peer, case, tmp_path / "ours", OTHER)


@pytest.mark.parametrize("format", ["bin", "safetensors"])
def test_as_mamba_ssm_publishes_it(tmp_path, format):
    """The config, the tensors' names and the padded vocabulary of state-spaces/mamba2-130m, smaller."""
    config = Mamba2Config(
        vocab_size=64,
        hidden_size=16,
        num_heads=4,
        head_dim=8,
        n_groups=1,
        state_size=128,
        num_hidden_layers=3,
        tie_word_embeddings=True,
    )
    peer = hf.random_peer(hf.Case(config, 2, 21, seed=5), Mamba2ForCausalLM)
    published = {
        "d_model": 16,
        "d_intermediate": 0,
        "n_layer": 3,
        "vocab_size": 53,
        "ssm_cfg": {"layer": "Mamba2", "headdim": 8},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    (tmp_path / "config.json").write_text(json.dumps(published), encoding="utf-8")
    state = {name.replace("embeddings.", "embedding."): tensor for name, tensor in peer.state_dict().items()}
    if format == "bin":
        torch.save(state, tmp_path / "pytorch_model.bin")
    else:
        save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / "model.safetensors")
    ours = load_hf(tmp_path, platform=platform.cpu())
    assert hf.logits_apart(ours, peer, torch.randint(1, 64, (2, 21))) < hf.TOLERANCE


@pytest.mark.parametrize("case", hf.cases("mamba2", draw, Mamba2Config)[:8])
def test_padding_on_the_right(case):
    peer = hf.random_peer(case, Mamba2ForCausalLM)
    assert hf.padding_apart(hf.ours_in_memory(peer), peer, case, "right") < hf.TOLERANCE


@pytest.mark.parametrize("use_bias", [False, True])
@pytest.mark.parametrize("case", hf.cases("mamba2", draw, Mamba2Config)[:6])
def test_padding_on_the_left(case, use_bias):
    """With use_bias the class is wrong: it zeroes padding before in_proj, whose bias then fills the convolution's window
    where a row of its own has zeros before it. Ours agrees with the row alone, so the two must differ."""
    case.config.use_bias = use_bias
    peer = hf.random_peer(case, Mamba2ForCausalLM)
    apart = hf.padding_apart(hf.ours_in_memory(peer), peer, case, "left")
    assert apart > 1e-3 if use_bias else apart < hf.TOLERANCE
