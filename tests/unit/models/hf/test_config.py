"""Published config.jsons read, and models of ours written as such: counts, refusals, round trips."""

import contextlib
import copy
import json
import logging
import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from llmtrain.errors import UserError
from llmtrain.models.config import ModelConfig
from llmtrain.models.hf.family import UnsupportedModelError, families, family_for_model, family_of_hf_config
from llmtrain.models.pattern import format_pattern, parse_pattern
from llmtrain.schema.load import load_config
from tests.support import published_configs as published
from tests.support.conversion import CONFIGS
from tests.support.hf import names_of

ROOT = Path(__file__).parents[4]
YAMLS = sorted((ROOT / "yamls" / "pretrain").glob("*.yaml"))

# Parameters as the hub counts them, where it was at hand; all are compared with transformers' own model besides.
PUBLISHED: dict[str, tuple[dict[str, Any], int | float]] = {
    "mosaicml/mpt-7b": (published.MPT_7B, 6_649_286_656),
    "mosaicml/mpt-30b": (published.MPT_30B, 29_957_200_896),
    "mosaicml/mpt-7b-storywriter": (published.MPT_7B_STORYWRITER, 6_649_286_656),
    "meta-llama/Llama-2-7b-hf": (published.LLAMA_2_7B, 6_738_415_616),
    "TinyLlama/TinyLlama_v1.1": (published.TINY_LLAMA, 1_100_048_384),
    "meta-llama/Llama-3.1-8B": (published.LLAMA_3_1_8B, 8_030_261_248),
    "meta-llama/Llama-3.2-1B": (published.LLAMA_3_2_1B, 1_235_814_400),
    "state-spaces/mamba2-2.7b": (published.MAMBA2_2_7B_SSM, 2.70e9),
    "AntonV/mamba2-130m-hf": (published.MAMBA2_130M_HF, 129e6),
    "mistralai/Mamba-Codestral-7B-v0.1": (published.CODESTRAL_7B, 7.29e9),
    "Zyphra/Zamba2-1.2B": (published.ZAMBA2_1_2B, 1_215_064_704),
    "Zyphra/Zamba2-2.7B": (published.ZAMBA2_2_7B, 2.66e9),
    "Zyphra/Zamba2-7B": (published.ZAMBA2_7B, 7.36e9),
    "mistralai/Mistral-7B-v0.1": (published.MISTRAL_7B, 7_241_732_096),
    "Qwen/Qwen2.5-7B": (published.QWEN2_5_7B, 7_615_616_512),
    "Qwen/Qwen3-8B": (published.QWEN3_8B, 8_190_735_360),
    "allenai/OLMo-2-1124-7B": (published.OLMO2_7B, 7_298_617_344),
    "microsoft/Phi-3-mini-4k-instruct": (published.PHI3_MINI, 3_821_079_552),
    "ibm-granite/granite-3.1-8b-base": (published.GRANITE_8B, 8_170_848_256),
    "EleutherAI/pythia-6.9b": (published.PYTHIA_6_9B, 6_857_302_016),
    "bigcode/starcoder2-3b": (published.STARCODER2_3B, 3_030_371_328),
    "google/gemma-2-9b": (published.GEMMA2_9B, 9_241_705_984),
    "google/gemma-3-1b-pt": (published.GEMMA3_1B, 999_885_952),
    "nvidia/Nemotron-H-8B-Base-8K": (published.NEMOTRON_H_8B, 8.1e9),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": (published.NEMOTRON_NANO_9B_V2, 8.89e9),
    "ibm-granite/granite-4.0-h-350m": (published.GRANITE_4_H_350M, 340e6),
    "ibm-granite/granite-4.0-h-1b": (published.GRANITE_4_H_1B, 1.46e9),
    "ibm-granite/granite-4.0-h-micro": (published.GRANITE_4_H_MICRO, 3_191_396_096),
    "ibm-ai-platform/Bamba-9B": (published.BAMBA_9B, 9.78e9),
    "tiiuae/Falcon-H1-0.5B-Base": (published.FALCON_H1_500M, 521_411_104),
    "tiiuae/Falcon-H1-1.5B-Base": (published.FALCON_H1_1_5B, 1.55e9),
    "tiiuae/Falcon-H1-7B-Base": (published.FALCON_H1_7B, 7.59e9),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (published.QWEN3_NEXT_80B, 79.67e9),
    "allenai/Olmo-Hybrid-7B": (published.OLMO_HYBRID_7B, 7.43e9),
}


def read(config: dict[str, Any]) -> ModelConfig:
    return ModelConfig.model_validate(family_of_hf_config(config).read_config(config))


def count(config: ModelConfig) -> int:
    return sum(math.prod(shape) for _, shape in names_of(config))


def parameters_of_transformers(config: dict[str, Any]) -> int:
    kind = CONFIG_MAPPING[config["model_type"]]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(kind.from_dict(copy.deepcopy(config)))
    model.tie_weights()
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_of_published_models(name):
    config, expected = PUBLISHED[name]
    ours = read(config)
    found = count(ours)
    assert found == expected if isinstance(expected, int) else abs(found / expected - 1) < 5e-3
    try:
        written = family_for_model(ours).write_config(ours)
    except UnsupportedModelError:
        assert name == "mosaicml/mpt-7b-storywriter"  # transformers' class has another ALiBi
        return
    assert found == parameters_of_transformers(written)
    if "model_type" in config:
        assert found == parameters_of_transformers(config)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_are_all_parameters_in_order(name):
    config, _ = PUBLISHED[name]
    ours = read(config)
    weights = family_of_hf_config(config).weights(ours)
    assert [(weight.ours, weight.shape) for weight in weights] == names_of(ours)
    names = [name for weight in weights for part in weight.parts for name in part.names]
    assert len(names) == len(set(names))


def test_what_is_read():
    llama = read(published.LLAMA_3_1_8B)
    assert llama.layers == "attn*32" and llama.max_seq_len == 131072 and not llama.tie_embeddings
    assert llama.blocks["attn"].model_dump()["position"] == {
        "type": "rotary",
        "theta": 500000.0,
        "fraction": 1.0,
        "scaling": {
            "type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_seq_len": 8192,
        },
    }
    story = read(published.MPT_7B_STORYWRITER).blocks["attn"].model_dump()
    assert story["position"] == {"type": "alibi", "max_bias": 16.0} and story["clip_qkv"] == 6.0
    mamba = read(published.MAMBA2_2_7B_SSM)
    assert mamba.vocab_size == 50288 and mamba.layers == "m*64"
    zamba = read(published.ZAMBA2_2_7B)
    assert zamba.layers == "m*6 (s+m m*5)*6 s+m m*4 s+m m*3 s+m m*2"
    assert zamba.blocks["m"].model_dump()["dt_limit"] == (0.001, None)


def test_old_and_new_spellings():
    """rope_theta and rope_scaling against rope_parameters; hybrid_layer_ids alone; infinity both ways."""
    old = published.LLAMA_3_1_8B
    new = {key: value for key, value in old.items() if key not in ("rope_scaling", "rope_theta")}
    new["rope_parameters"] = old["rope_scaling"] | {"rope_theta": 500000.0}
    assert read(new) == read(old)
    older = old | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert read(older).blocks["attn"].model_dump()["position"]["scaling"] == {"type": "linear", "factor": 2.0}

    zamba = {key: value for key, value in published.ZAMBA2_7B.items() if key != "layers_block_type"}
    assert read(zamba) == read(published.ZAMBA2_7B)

    mamba = published.MAMBA2_130M_HF
    assert read(mamba | {"time_step_limit": [0.0, {"__float__": "Infinity"}]}) == read(mamba)
    limited = read(mamba | {"time_step_limit": [0.01, math.inf]})
    assert limited.blocks["m"].model_dump()["dt_limit"] == (0.01, None)


def _attention(**changes: Any) -> dict[str, Any]:
    return {"attn_config": published.MPT_7B["attn_config"] | changes}


def _rope(**scaling: Any) -> dict[str, Any]:
    return {"rope_scaling": scaling}


def _ssm(**changes: Any) -> dict[str, Any]:
    return {"ssm_cfg": {"layer": "Mamba2"} | changes}


@pytest.mark.parametrize(
    "config, change, message",
    [
        (published.MPT_7B, {"expansion_ratio": 2}, "expansion_ratio = 2.*has 4"),
        (published.MPT_7B, {"logit_scale": "inv_sqrt_d_model"}, "logit_scale = inv_sqrt_d_model"),
        (published.MPT_7B, _attention(qk_ln=True), "attn_config.qk_ln = true"),
        (published.MPT_7B, _attention(prefix_lm=True), "attn_config.prefix_lm = true"),
        (published.MPT_7B, _attention(alibi=False), "attn_config.alibi = false"),
        (published.MPT_7B, _attention(attn_type="grouped_query_attention"), "attn_type = grouped_query_attention"),
        (published.MPT_7B, _attention(softmax_scale=0.0), "softmax_scale"),
        (published.MPT_7B, {"d_model": "wide"}, "d_model = .wide.: expected an integer"),
        (published.LLAMA_2_7B, {"hidden_act": "relu"}, "hidden_act = relu: there are silu, swish, gelu,"),
        (
            published.LLAMA_2_7B,
            _rope(type="dynamic", factor=2.0),
            "rope_type = dynamic: there are default, .* and yarn; the freq",
        ),
        (
            published.LLAMA_2_7B,
            _rope(rope_type="longrope", short_factor=[1.0], long_factor=[2.0]),
            "rope_type = longrope",
        ),
        (published.LLAMA_2_7B, _rope(rope_type="yarn", factor=2.0, beta_slow=40.0), "beta_slow: must not exceed"),
        (published.LLAMA_2_7B, _rope(rope_type="llama3"), "does not accept .*factor"),
        (published.LLAMA_2_7B, {"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5"),
        (published.LLAMA_2_7B, {"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        (published.LLAMA_2_7B, {"hidden_size": 4097}, "does not accept"),
        (published.MAMBA2_130M_HF, {"rms_norm": False}, "rms_norm = false"),
        (published.MAMBA2_2_7B_SSM, _ssm(layer="Mamba1"), "ssm_cfg.layer = Mamba1"),
        (published.MAMBA2_2_7B_SSM, {"ssm_cfg": {}}, "ssm_cfg.layer = Mamba1"),
        (published.MAMBA2_2_7B_SSM, _ssm(d_ssm=64), "ssm_cfg.d_ssm = 64"),
        (published.MAMBA2_2_7B_SSM, {"attn_layer_idx": [9, 18]}, "attn_layer_idx"),
        (published.MAMBA2_2_7B_SSM, {"d_intermediate": 100}, "d_intermediate = 100"),
        (published.MAMBA2_2_7B_SSM, {"rms_norm": False}, "rms_norm = false"),
        (published.ZAMBA2_7B, {"hidden_act": "relu"}, "hidden_act = relu"),
        (published.ZAMBA2_7B, {"hybrid_layer_ids": [3]}, "hybrid_layer_ids"),
        (published.ZAMBA2_7B, {"num_hidden_layers": 80}, "num_hidden_layers = 80"),
        (published.ZAMBA2_7B, {"time_step_limit": [0.01, 0.1]}, "time_step_limit"),
        (published.ZAMBA2_7B, {"mamba_headdim": 32}, "n_mamba_heads"),
        (published.ZAMBA2_1_2B, {"num_key_value_heads": 8}, "use_shared_attention_adapter"),
        (published.LLAMA_2_7B, {"model_type": None}, "config.json has no model_type; there is "),
        (
            published.LLAMA_2_7B,
            {"model_type": "gpt2"},
            "'gpt2'; .*; there is apertus, bamba, deepseek_v2, deepseek_v3, ",
        ),
        (published.LLAMA_2_7B, {"model_type": "x", "mamba_dt_rank": 8}, "needs what is not here: Mamba-1 layers"),
        (
            published.LLAMA_2_7B,
            {"model_type": "recurrent_gemma", "lru_width": 2560},
            "RG-LRU layers .lru_width.; there",
        ),
        (
            published.LLAMA_2_7B,
            {"sliding_window": 4096},
            "sliding_window = 4096: LlamaForCausalLM passes over it; set it",
        ),
        (published.GRANITE_8B, {"sliding_window": 4096}, "sliding_window = 4096: GraniteForCausalLM passes over it"),
        (published.MISTRAL_7B, {"attention_bias": True}, "attention_bias = true: MistralForCausalLM passes over it"),
        (published.QWEN3_8B, {"mlp_bias": True}, "mlp_bias = true: Qwen3ForCausalLM passes over it; set it to false"),
        (
            published.PYTHIA_6_9B,
            {"num_key_value_heads": 8},
            "num_key_value_heads = 8: GPTNeoXForCausalLM passes over it",
        ),
        *(
            (one, {"is_causal": False}, "is_causal = false: attention is causal here")
            for one in (published.LLAMA_2_7B, published.ZAMBA2_7B, published.NEMOTRON_H_8B)
        ),
        (published.GRANITE_8B, {"logits_scaling": 0.0}, "logits_scaling = 0.0: must be positive"),
        (published.GRANITE_4_H_350M, {"logits_scaling": -8.0}, "logits_scaling = -8.0: must be positive"),
        (published.QWEN3_NEXT_80B, {"num_experts_per_tok": 513}, "top_k.*exceeds n_experts"),
        (published.QWEN3_NEXT_80B, {"num_experts": 0, "hidden_act": "gelu"}, "hidden_act = gelu: the convolution has"),
        (published.OLMO_HYBRID_7B, {"layer_types": ["mamba"] * 32}, "does not accept|there are linear_attention and"),
        (
            published.GRANITE_4_H_350M,
            {"layer_types": ["mamba", "moe"] * 16},
            r"layer_types = \['moe'\]: there are linear",
        ),
        (published.BAMBA_9B, {"layers_block_type": ["mamba"] * 32}, "BambaConfig does not accept"),
        (
            published.OLMO_HYBRID_7B,
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type = dynamic",
        ),
    ],
)
def test_refusals(config, change, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(config | change)


def test_refusals_come_all_at_once():
    with pytest.raises(UnsupportedModelError) as caught:
        read(published.MPT_7B | {"no_bias": False, "logit_scale": 0.5} | _attention(qk_ln=True))
    assert len(caught.value.reasons) == 4


def test_features_without_effect_are_passed_over():
    """Mamba-Codestral's file has norm_before_gate: true, which its weights contradict and the class does not read."""
    assert not read(published.CODESTRAL_7B).blocks["m"].model_dump()["norm_before_gate"]
    changed = {
        "attention_dropout": 0.1,
        "pretraining_tp": 2,
        "use_cache": False,
        "is_causal": True,
        "sliding_window": None,
    }
    assert read(published.LLAMA_2_7B | changed) == read(published.LLAMA_2_7B)


WITHOUT_CLASS = {
    "kda-130m": "KimiLinearForCausalLM has kimi_delta and latent_attention layers",
    "cca-130m": "ZayaForCausalLM has experts in every layer",
    "mamba3-130m": r"model.blocks.m.type = mamba3",
    "mla-130m": "tie_word_embeddings = true: KimiLinearForCausalLM has an output layer of its own",
}


@pytest.mark.parametrize("file", YAMLS, ids=lambda file: file.stem)
def test_our_own_models(file):
    """Written and read back the same, or refused by what no published class has; for MPT with biases and learned positions, with
    what to change."""
    config = load_config(file).model
    if file.stem.startswith("mpt") and not file.stem.endswith("alibi"):
        with pytest.raises(UnsupportedModelError) as caught:
            family_for_model(config)
        reasons = str(caught.value)
        assert reasons.index("MptForCausalLM") < reasons.index("LlamaForCausalLM")
        assert "model.positions = learned: the class has none; set positions: none" in reasons
        assert "model.blocks.attn.position.type = none: MptForCausalLM has alibi; set type: alibi" in reasons
        assert "model.blocks.attn.qkv_bias = true: the class has false; set qkv_bias: false" in reasons
        return
    if file.stem in WITHOUT_CLASS:
        with pytest.raises(UnsupportedModelError, match=WITHOUT_CLASS[file.stem]):
            family_for_model(config)
        return
    family = family_for_model(config)
    written = json.loads(json.dumps(family.write_config(config), allow_nan=False))
    assert written["architectures"] == [family.architecture] and written["model_type"] == family.model_type
    assert not {"bos_token_id", "eos_token_id", "pad_token_id", "dtype"} & written.keys()
    again = read(written)
    names = names_of(again)
    assert sorted(names) == sorted((w.ours, w.shape) for w in family.weights(again))
    assert sum(math.prod(shape) for _, shape in names) == count(config)


def test_token_ids_that_a_class_has_by_default_bring_no_warning(caplog, monkeypatch):
    """GPTNeoXConfig's lie outside StarCoder2's vocabulary; `llmtrain describe` tries the one before the other."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    family_for_model(load_config(ROOT / "yamls" / "pretrain" / "starcoder2-3b.yaml").model)
    assert caplog.messages == []


def test_older_readers_find_the_rotary_settings():
    written = family_for_model(read(published.LLAMA_3_1_8B)).write_config(read(published.LLAMA_3_1_8B))
    assert written["rope_theta"] == 500000.0 and written["rope_scaling"] == published.LLAMA_3_1_8B["rope_scaling"]
    assert written["rope_parameters"] == written["rope_scaling"] | {"rope_theta": 500000.0}


def test_families():
    assert [family.model_type for family in families()] == [
        *("mpt", "llama", "mistral", "qwen2", "qwen3", "olmo2", "olmo3", "phi3", "granite", "gpt_neox", "starcoder2"),
        *("gemma2", "gemma3_text", "mamba2", "zamba2", "nemotron_h"),
        *("bamba", "granitemoehybrid", "falcon_h1", "qwen3_next", "olmo_hybrid", "kimi_linear"),
        *("mixtral", "olmoe", "qwen3_moe", "granitemoe", "dots1", "gpt_oss"),
        *("deepseek_v2", "deepseek_v3"),
        *("smollm3", "glm", "glm4", "seed_oss", "helium", "glm4_moe", "apertus", "zaya", "ministral", "ernie4_5"),
    ]


def test_the_documentation_has_every_family_in_the_order_in_which_an_export_tries_them():
    table = (
        (ROOT / "docs" / "models.md").read_text(encoding="utf-8").partition("| `model_type` |")[2].partition("\n\n")[0]
    )
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == [family.model_type for family in families()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"\[(\d+) families\]", readme) == [str(len(families()))]


@pytest.mark.parametrize(
    "text", ["a", "m*6 (s+m m*5)*7", "m*5 (s+m m*5)*5 s+m m*2", "(a b)*3 a*2", "a b c a b c", "s+m*3"]
)
def test_patterns_are_written_as_they_are_read(text):
    layers = parse_pattern(text)
    written = format_pattern(layers)
    assert parse_pattern(written) == layers and len(written) <= len(text)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers = 1000000000: expected an integer between 1 and 10,000"),
        ({"hidden_size": 0}, "hidden_size = 0: expected"),
        ({"rope_theta": "x"}, 'rope_theta = "x": expected a number'),
        ({"rope_scaling": 3}, "rope_scaling = 3: expected a mapping"),
        ({"initializer_range": 2**100}, "initializer_range = "),
        ({"layer_types": -1}, "layer_types = -1: expected a list"),
    ],
)
def test_a_value_of_another_type_or_range_is_named(changes, named):
    with pytest.raises(UnsupportedModelError, match=re.escape(named)):
        family_of_hf_config({"model_type": "llama"} | changes)


@pytest.mark.ci
@pytest.mark.parametrize("name", CONFIGS)
def test_mutants_of_every_key_are_read_or_refused(name):
    base = json.loads(CONFIGS[name]().to_json_string())
    nested = [(key, below) for key, value in base.items() if isinstance(value, dict) for below in value]
    for path in [(key,) for key in base] + nested:
        for value in (None, "x", -1, 0, 10**9, 2**100, float("inf"), [], [1], {"a": 1}, True):
            config = copy.deepcopy(base)
            (config if len(path) == 1 else config[path[0]])[path[-1]] = value
            with contextlib.suppress(UserError):
                family_of_hf_config(config).read_config(config)
