"""Refusals of model types that no family reads: what is lacking, by the settings of their config.json."""

import json
import re
from typing import Any

import pytest
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from llmtrain.models.hf.family import UnsupportedModelError, families, family_of_hf_config

LACKING = {
    "deepseek_v32": "sparse attention (index_topk)",
    "jamba": "Mamba-1 layers (mamba_dt_rank)",
    "mamba": "Mamba-1 layers (time_step_rank)",
    "rwkv": "RWKV layers (rescale_every)",
    "recurrent_gemma": "RG-LRU layers (lru_width); of its settings no family here has conv1d_width = 4, logits_soft_cap = 30.0",
    "lfm2": "short convolutions (conv_L_cache)",
    "llama4_text": "attention within chunks (attention_chunk_size)",
    "gemma3": "images (vision_config)",
    "bart": "an encoder (is_encoder_decoder)",
    "gpt2": '; of its settings no family here has activation_function = "gelu_new", scale_attn_weights = true; there is',
    "persimmon": "no family here has qk_layernorm = true; there is",
    "diffllama": "no family here has lambda_std_dev = 0.1",
    "opt": 'no family here has activation_function = "relu", do_layer_norm_before = true, enable_bias = true, ffn_dim = 3072',
    "cwm": "needs what is not here: windows by layer (layer_types) in Llama's layers; there is",
    "ministral3": "queries scaled by their position (rope_parameters.llama_4_scaling_beta)",
    "internlm3": ", which transformers computes by LlamaForCausalLM; set model_type: llama; there is",
    "dbrx": "; of its settings no family here has ffn_config; there is",
    "emu3": "; of its settings no family here has text_config, vq_config; there is",
    "jais2": "; the nearest family, helium, has no layer_norm_eps = 1e-05; there is",
    "cohere": "; the nearest family, apertus, has no layer_norm_eps = 1e-05, logit_scale = 0.0625; there is",
    "xlstm": " more; there is",
}


def published(model_type: str) -> dict[str, Any]:
    return json.loads(CONFIG_MAPPING[model_type]().to_json_string())


def refusal(config: dict[str, Any]) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        family_of_hf_config(config)
    return str(caught.value)


@pytest.mark.parametrize("model_type", LACKING)
def test_what_is_lacking_is_reported_by_its_settings(model_type):
    said = refusal(published(model_type))
    assert said.startswith(f"config.json has model_type '{model_type}'") and LACKING[model_type] in said
    assert said.endswith(", zaya")


@pytest.mark.slow
def test_every_causal_model_of_transformers_is_read_or_refused_by_a_setting():
    read = {family.model_type for family in families()}
    others = [name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if name not in read and name in CONFIG_MAPPING]
    assert len(others) > 100
    tried = 0
    for name in others:
        try:
            config = published(name)
        except Exception:  # a class that has no defaults
            continue
        tried += 1
        said = refusal(config)
        assert "\n" not in said and len(said) < 900, name
        assert re.search(r"needs what is not here|no family here has \w|has no \w|; set model_type: ", said), said
    assert tried > 100


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_type": "deepseek_v32"}, ", which needs what is not here: sparse attention"),
        ({"model_type": "deepseek_v32", "n_routed_experts": None}, ", which needs what is not here: sparse attention"),
        ({"model_type": "of-my-own", "dtype": "bfloat16"}, ", and no settings by which to say what it needs; there is"),
        (
            {"model_type": "of-my-own", "hidden_size": 8, "vocab_size": 9, "bos_token_id": 1},
            "; its settings (hidden_size = 8, vocab_size = 9) are apertus's too, but what its class computes",
        ),
        (
            {"model_type": "of-my-own", "hidden_size": 8, "attention_dropout": 0.1, "n_loops": 3, "share": False},
            "; of its settings no family here has n_loops = 3; there",
        ),
    ],
)
def test_a_file_of_few_settings_is_refused_by_what_its_class_takes_for_the_others(config, said):
    assert refusal(config).startswith(f"config.json has model_type {config['model_type']!r}{said}")


@pytest.mark.parametrize("model_type", [3, 0, False, ["llama"], [], {"a": 1}])
def test_a_type_that_is_no_name(model_type):
    said = f"config.json has model_type = {json.dumps(model_type)}, which is no name; there is apertus, "
    assert refusal({"model_type": model_type, "hidden_size": 8}).startswith(said)
