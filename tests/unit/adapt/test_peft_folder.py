"""Folders of peft that do not fit: one line with file and remedy. What fits: tests/numerics/test_peft.py."""

import json
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file

from llmtrain.adapt.base import converters_of, meta_model
from llmtrain.adapt.lora import Lora
from llmtrain.adapt.nf4 import quantised, widened
from llmtrain.adapt.peft_folder import CONFIG, WEIGHTS, write_peft
from llmtrain.adapt.peft_read import read_peft
from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import family_for_model
from llmtrain.schema.adapt import AdaptConfig, LoraConfig

MLP = {"type": "swiglu", "d_ff": 24}
ATTENTION = {"type": "attention", "n_heads": 4, "n_kv_heads": 2, "position": {"type": "rotary"}, "mlp": MLP}
MODEL = ModelConfig.model_validate(
    {
        "vocab_size": 50,
        "d_model": 16,
        "norm": {"type": "rmsnorm"},
        "tie_embeddings": False,
        "blocks": {"a": ATTENTION},
        "layers": "a*2",
    }
)


@pytest.fixture
def folder(tmp_path):
    adapt = AdaptConfig(lora=LoraConfig(rank=3, targets=["*.wqkv.q", "*.w_in", "head"]))
    [lora] = [one for one in converters_of(MODEL, adapt) if isinstance(one, Lora)]
    tensors = {
        name: torch.randn(p.shape) for name, p in meta_model(MODEL, adapt).named_parameters() if ".lora." in name
    }
    write_peft(tmp_path, lora, tensors, MODEL, family_for_model(MODEL), {"address": "base", "save_id": "1"})
    found = read_peft(tmp_path, MODEL)
    assert found.adapt.lora is not None and found.base == {"address": "base", "save_id": "1"}
    assert found.tensors.keys() == tensors.keys() and all(torch.equal(found.tensors[n], t) for n, t in tensors.items())
    return tmp_path


EXPERTS = MODEL.model_copy(
    update={
        "blocks": {
            "a": type(MODEL.blocks["a"]).model_validate(
                ATTENTION | {"qk_norm": "head", "mlp": {"type": "experts", "n_experts": 3, "top_k": 2, "d_ff": 12}}
            )
        }
    }
)


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (["experts.gate_up_proj"], "has adapters model.layers.0.mlp.experts, model.layers.0.mlp.experts.base_layer"),
        (["experts.gate_up_proj", "experts.down_proj", "experts.gate"], "target_parameters: experts.gate: no adapter"),
        ([], "has no model.layers.0.mlp.experts"),
        (["experts.gate_up_proj", "experts.down_proj"], None),
    ],
)
def test_adapters_of_experts_have_the_names_of_their_parameters(tmp_path, targets, message):
    """peft wraps the second of two parameters of a module around the first, and passes over names that match nothing."""
    adapt = AdaptConfig(lora=LoraConfig(rank=2, targets=["*.wqkv.q", "*.experts.w_in", "*.experts.w_out"]))
    [lora] = [one for one in converters_of(EXPERTS, adapt) if isinstance(one, Lora)]
    parameters = meta_model(EXPERTS, adapt).named_parameters()
    tensors = {name: torch.randn(p.shape) for name, p in parameters if ".lora." in name}
    write_peft(tmp_path, lora, tensors, EXPERTS, family_for_model(EXPERTS), None)
    settings = json.loads((tmp_path / CONFIG).read_text())
    assert settings["target_modules"] == ["q_proj"] and len(settings["target_parameters"]) == 4
    (tmp_path / CONFIG).write_text(json.dumps(settings | {"target_parameters": targets}))
    if message is not None:
        with pytest.raises(UserError, match=message):
            read_peft(tmp_path, EXPERTS)
        return
    found = read_peft(tmp_path, EXPERTS).tensors
    assert found.keys() == tensors.keys() and all(torch.equal(found[name], one) for name, one in tensors.items())


@pytest.mark.parametrize("setting", ["dora", "dropout"])
def test_experts_have_adapters_of_matrices_alone(setting):
    settings = {"targets": ["*.experts.w_in"], setting: True if setting == "dora" else 0.1}
    with pytest.raises(UserError, match=f"adapt.lora.{setting}: not of experts"):
        converters_of(EXPERTS, AdaptConfig(lora=LoraConfig.model_validate(settings)))


@pytest.mark.parametrize(
    ("setting", "value", "remedy"),
    [
        ("peft_type", "LOHA", "merge it with peft"),
        ("bias", "all", "train or save it without"),
        ("lora_bias", True, "train or save it without"),
        ("modules_to_save", ["lm_head"], "train or save it without"),
        ("target_parameters", ["experts.down_proj"], "no adapter in adapter_model.safetensors is of it"),
        ("fan_in_fan_out", True, "train or save it without"),
        ("trainable_token_indices", [3], "train or save it without"),
        ("layer_replication", [[0, 1]], "train or save it without"),
        ("use_qalora", True, "train or save it without"),
        ("init_lora_weights", "pissa", "it changed the base's weights"),
        ("r", 4, "whose tensors have 3"),
        ("r", "x", 'r = "x" is no whole number above 0'),
        ("lora_alpha", 0, "lora_alpha = 0 is no number above 0"),
        ("lora_alpha", float("nan"), "lora_alpha = NaN is no number above 0"),
        ("lora_dropout", 1.5, "lora_dropout = 1.5 is no number from 0 to below 1"),
        ("lora_alpha", [1], "no number"),
        ("lora_dropout", "a", "no number"),
        ("rank_pattern", [1], "rank_pattern is no mapping"),
        ("rank_pattern", {"(": 3}, "no regular expression"),
        ("alpha_pattern", {"q_proj": "x"}, "no number"),
        ("use_dora", True, "only layers of mixers and MLPs|has no lora_magnitude_vector"),
    ],
)
def test_settings_that_are_not_here_are_refused(folder, setting, value, remedy):
    settings = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(settings | {setting: value}))
    with pytest.raises(UserError, match=remedy) as error:
        read_peft(folder, MODEL)
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({Q.format("A"): torch.zeros(3, 20)}, "another base"),
        ({Q.format("B"): torch.zeros(20, 3)}, "another base"),
        (
            {Q.format("A"): torch.zeros(17, 16), Q.format("B"): torch.zeros(16, 17)},
            "rank 17, and the layer 16 channels|rank 3 of",
        ),
        ({Q.format("A"): None}, "has no lora_A"),
        (
            {Q.format("A").replace("layers.0", "layers.9"): torch.zeros(3, 16)},
            "which this base is, has no .*another model",
        ),
        ({"base_model.model.lm_head.weight": torch.zeros(50, 16)}, "no part of a LoRA adapter"),
    ],
)
def test_tensors_of_another_base_are_refused(folder, change, message):
    tensors = load_file(folder / WEIGHTS) | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)
    with pytest.raises(UserError, match=message) as error:
        read_peft(folder, MODEL)
    assert str(folder / WEIGHTS) in str(error.value) or str(folder / CONFIG) in str(error.value)


def test_files_that_are_not_there_or_damaged_are_refused(folder):
    (folder / WEIGHTS).write_bytes(b"\x00" * 20)
    with pytest.raises(UserError, match="is damaged"):
        read_peft(folder, MODEL)
    (folder / WEIGHTS).unlink()
    (folder / "adapter_model.bin").touch()
    with pytest.raises(UserError, match="safe_serialization"):
        read_peft(folder, MODEL)
    (folder / CONFIG).write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_peft(folder, MODEL)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["*.wkv"]}, "matches no layer; did you mean"),
        ({"targets": ["*.wo"], "groups": [{"match": "*.w_inn", "rank": 2}]}, "groups: .*matches no layer"),
        ({"targets": ["*.wqkv.k"], "rank": 9}, "8 channels, fewer than rank 9"),
        ({"rank": 4096}, "rank: no layer has so many channels"),
        ({"targets": ["head"], "dora": True}, "dora: not of head"),
        (
            {"targets": ["*.wqkv.q"], "groups": [{"match": "*.wo", "rank": 2}]},
            r"groups: \*\.wo: no adapter is of it; add it to",
        ),
        ({"groups": [{"match": "*.wo", "rank": 500}]}, "wo has .* fewer than rank 500; give it a smaller one"),
    ],
)
def test_settings_that_fit_no_layer_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        meta_model(MODEL, AdaptConfig(lora=LoraConfig.model_validate(settings)))


@pytest.mark.parametrize("targets", [None, ["*.wqkv"], ["*.wqkv.q", "*.wqkv.k", "*.wo"]])
def test_a_group_of_a_fused_projection_is_of_its_parts(targets):
    groups = [{"match": "*.wqkv", "rank": 2, "alpha": 6}, {"match": "*.wqkv.k", "rank": 3}]
    adapt = AdaptConfig(lora=LoraConfig.model_validate({"targets": targets, "groups": groups}))
    lora = cast("Lora", converters_of(MODEL, adapt)[0])
    units = {
        site.name: {unit.name: (unit.rank, unit.scale) for unit in found} for site, found in lora.adapters.values()
    }
    assert units["blocks.0.mixer.wqkv"]["q"] == (2, 3.0) and units["blocks.0.mixer.wqkv"].get("k", (3, 2.0)) == (3, 2.0)
    assert units.get("blocks.0.mixer.wo", {"whole": (8, 2.0)}) == {"whole": (8, 2.0)}


def test_four_bits_are_as_near_as_torchaos():
    to_nf4 = pytest.importorskip("torchao.quantization.quantize_.workflows.nf4.nf4_tensor").to_nf4
    weight = 0.02 * torch.randn(256, 256, generator=torch.Generator().manual_seed(1))
    one = quantised(weight)
    ours = widened(one.codes, one.scales, one.steps, one.mean, one.shape, one.dtype)
    theirs = to_nf4(weight, 64, 256).get_original_weight()
    assert (ours - weight).norm() <= 1.01 * (theirs - weight).norm() < 0.1 * weight.norm()
