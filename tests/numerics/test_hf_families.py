"""Every family against its class in transformers: logits, every gradient, decoding, padding, and back to the same bits."""

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Mamba2Config, MptConfig, Zamba2Config
from transformers.models.mpt.modeling_mpt import MptModel, build_mpt_alibi_tensor

from llmtrain.kernels import platform
from llmtrain.models.hf.family import UnsupportedModelError, family_of_hf_config
from llmtrain.models.hf.load import load_hf
from tests.support import hf
from tests.support.hf_families import MAMBA2, MPT, NEMOTRON_H, PEERS, ZAMBA2, unties_shared_blocks


@hf.every_case(PEERS)
def test_same_function_and_back(name, number):
    peer = PEERS[name]
    case = peer.case(number)
    theirs = peer.made(case)
    ours = hf.ours_in_memory(theirs)
    hf.assert_same_function(peer.family, ours, theirs, case)
    if peer is ZAMBA2 and unties_shared_blocks(case.config):
        with pytest.raises(UnsupportedModelError, match=r"tie_embeddings = false: .* set tie_embeddings: true"):
            peer.family.write_config(ours.config)
    else:
        hf.assert_back_is_equal(peer.family, ours, theirs, case, peer.other)


@pytest.mark.parametrize(
    ("name", "number"),
    [
        pytest.param(name, number, marks=[pytest.mark.ci] * (number != peer.folders[-1]))
        for name, peer in PEERS.items()
        for number in peer.folders
    ],
)
def test_through_folders(name, number, tmp_path):
    """save_pretrained -> ours -> a folder -> from_pretrained, by the names of the files."""
    peer = PEERS[name]
    case = peer.case(number)
    theirs = saved = peer.made(case)
    for buffer_name, buffer in theirs.named_buffers():
        if buffer_name.endswith("balancing_biases"):
            buffer[-1] = -1.0  # which from_pretrained makes it, whatever the file holds
    if peer is ZAMBA2:
        # save_pretrained takes only those blocks for tied that the class ties: elsewhere it saves equal copies.
        saved = peer.model(case.config)
        saved.load_state_dict(theirs.state_dict())
    ours = hf.ours_from_folder(saved, tmp_path / "theirs", max_shard_size="8KB")
    assert hf.logits_apart(ours, theirs, hf.tokens_of(case)) < hf.TOLERANCE
    if peer is not ZAMBA2 or not unties_shared_blocks(case.config):
        hf.assert_export_loads(peer.family, ours, theirs, case, tmp_path / "ours", peer.other)


def padding_apart(name: str, case: hf.Case, side: str) -> float:
    theirs = PEERS[name].made(case)
    return hf.padding_apart(hf.ours_in_memory(theirs), theirs, case, side)


@hf.every_case(["llama", "mpt"], range(6))
def test_padding_on_the_left(name, number):
    assert padding_apart(name, PEERS[name].case(number), "left") < hf.TOLERANCE


@hf.every_case(["llama", "mpt", "mamba2", "zamba2"], range(8))
def test_padding_on_the_right(name, number):
    assert padding_apart(name, PEERS[name].case(number), "right") < hf.TOLERANCE


@pytest.mark.parametrize("biased", [False, True])
@hf.every_case(["mamba2", "zamba2"], range(6))
def test_padding_on_the_left_of_scans(name, number, biased):
    """With a bias the classes are wrong: they zero padding before in_proj, whose bias then fills the convolution's window
    where a row of its own has zeros before it. Ours agrees with the row alone, so the two must differ."""
    case = PEERS[name].case(number)
    setattr(case.config, "use_bias" if name == "mamba2" else "add_bias_linear", biased)
    apart = padding_apart(name, case, "left")
    assert apart > 1e-3 if biased else apart < hf.TOLERANCE


@pytest.mark.parametrize("format", ["bin", "safetensors"])
def test_as_mamba_ssm_publishes_it(tmp_path, format):
    """The config, the tensors' names and the padded vocabulary of state-spaces/mamba2-130m, smaller."""
    sizes: dict[str, Any] = {"hidden_size": 16, "num_heads": 4, "head_dim": 8, "n_groups": 1, "state_size": 128}
    config = Mamba2Config(vocab_size=64, num_hidden_layers=3, tie_word_embeddings=True, **sizes)
    peer = MAMBA2.made(hf.Case(config, 2, 21, seed=5))
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


def test_another_alibi_bias_max_is_read_as_it_was_trained(monkeypatch):
    """The class passes alibi_bias_max over; a file that has it was trained with it (by LLM Foundry)."""
    attention = {"alibi_bias_max": 16}
    config = MptConfig(vocab_size=hf.VOCAB, d_model=24, n_heads=3, n_layers=2, max_seq_len=64, attn_config=attention)
    case = hf.Case(config, 2, 21, seed=7)
    peer = MPT.made(case)
    ours = hf.ours_in_memory(peer)
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) > 1e-3

    def as_trained(self, num_heads, sequence_length, alibi_bias_max=8, device=None):
        return build_mpt_alibi_tensor(num_heads, sequence_length, 16, device)

    monkeypatch.setattr(MptModel, "build_mpt_alibi_tensor", as_trained)
    assert hf.logits_apart(ours, peer, hf.tokens_of(case)) < hf.TOLERANCE
    with pytest.raises(UnsupportedModelError, match="max_bias = 16"):
        MPT.family.write_config(ours.config)


@pytest.mark.parametrize("number", range(6))
def test_attention_section(number):
    case = MPT.case(number)
    written = MptConfig.from_dict(MPT.family.write_config(hf.our_config(MPT.family, case.config))).attn_config
    for key in ("attn_type", "alibi", "alibi_bias_max", "clip_qkv", "softmax_scale", "qk_ln", "prefix_lm"):
        assert getattr(written, key) == getattr(case.config.attn_config, key), key


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hybrid_override_pattern": "-M*"}, r"hybrid_override_pattern\[0\] = - \(mlp\): an MLP follows a mixer here"),
        ({"hybrid_override_pattern": "M--*"}, r"hybrid_override_pattern\[2\] = - \(mlp\)"),
        ({"hybrid_override_pattern": "EM*-"}, r"hybrid_override_pattern\[0\] = E \(moe\): a layer of experts follows"),
        ({"hybrid_override_pattern": "MQ*-Z"}, r"hybrid_override_pattern = \['Q', 'Z'\]: a string of M \(Mamba-2\), "),
        ({"hybrid_override_pattern": 7}, r"hybrid_override_pattern = \[7\]: a string of M"),
        ({"hybrid_override_pattern": ""}, 'hybrid_override_pattern = "": a string of M'),
        ({"hybrid_override_pattern": None, "layers_block_type": ["moe", "mamba"]}, r"layers_block_type\[0\] = moe"),
        ({"attention_bias": True}, "attention_bias = true: NemotronHForCausalLM passes over it"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings = true: NemotronHForCausalLM passes over it"),
        ({"mlp_hidden_act": "silu"}, "mlp_hidden_act = silu"),
    ],
)
def test_refusals_of_nemotron_h(change, message):
    published = {"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*-", "hidden_size": 4096}
    given = {key: value for key, value in (published | change).items() if value is not None}
    with pytest.raises(UnsupportedModelError, match=message):
        NEMOTRON_H.family.read_config(given)


SHARED = {"hidden_size": 16, "num_attention_heads": 2, "num_mem_blocks": 5, "adapter_rank": 3}


@pytest.mark.parametrize(
    ("layers", "sizes"),
    [(["linear_attention", "hybrid", "hybrid"], SHARED), (["linear_attention"] * 2, {"hidden_size": 32})],
    ids=["more copies than uses", "no hybrid layer"],
)
def test_shared_blocks_of_which_some_or_all_have_no_use(layers, sizes):
    """The class makes only as many as are used."""
    layout: dict[str, Any] = {"num_hidden_layers": len(layers), "layers_block_type": layers, "n_mamba_heads": 4}
    case = hf.Case(Zamba2Config(vocab_size=hf.VOCAB, **layout, **sizes), 2, 9, seed=3)
    peer = ZAMBA2.made(case)
    ours = hf.ours_in_memory(peer)
    hf.assert_same_function(ZAMBA2.family, ours, peer, case)
    if "hybrid" in layers:
        hf.assert_back_is_equal(ZAMBA2.family, ours, peer, case, ZAMBA2.other | {"num_mem_blocks"})


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
def test_refusals_of_hybrids(change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        family_of_hf_config(change).read_config(change)
