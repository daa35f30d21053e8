"""Reasons why a model of a type that no family reads cannot be expressed here, by the keys of its config.json."""

import dataclasses
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from llmtrain.errors import first_few

# Keys of config.json with a value -> what a model that has them needs, and no setting of ours says.
_LACKING = {
    "mamba_dt_rank": "Mamba-1 layers",
    "time_step_rank": "Mamba-1 layers",
    "lru_width": "RG-LRU layers",
    "rescale_every": "RWKV layers",
    "xlstm_block_type": "xLSTM layers",
    "conv_L_cache": "short convolutions",
    "attention_chunk_size": "attention within chunks",
    "index_topk": "sparse attention",
    "hidden_size_per_layer_input": "embeddings for each layer",
    "altup_num_inputs": "several residual streams",
    "vision_config": "images",
    "audio_config": "sound",
    "is_encoder_decoder": "an encoder",
}
# Model types whose settings a family here has too -> what their classes compute otherwise.
_CLASSES = {
    "arcee": "MLPs without a gate (hidden_act = relu2) in Llama's layers",
    "bert-generation": "norms behind the residual sum (layer_norm_eps) and learned positions",
    "bitnet": "norms within attention and MLP (attn_sub_norm, ffn_sub_norm)",
    "cwm": "windows by layer (layer_types) in Llama's layers",
    "flex_olmo": "experts (num_experts) in layers with norms behind their branches",
    "gemma": "norms of 1 + weight (rms_norm_eps) without Gemma 2's norms behind the branches",
    "granitemoeshared": "a shared expert (shared_intermediate_size) in layers of attention alone",
    "hunyuan_v1_dense": "norms of queries and keys behind the positions (query_layernorm, key_layernorm)",
    "hunyuan_v1_moe": "norms of queries and keys behind the positions (query_layernorm, key_layernorm)",
    "mellum": "windows and positions by layer (layer_types) beside experts",
    "minimax_m2": "routing by sigmoid (scoring_func) beside norms of whole queries and keys (use_qk_norm)",
    "ministral3": "queries scaled by their position (rope_parameters.llama_4_scaling_beta)",
    "olmo": "norms without weights (clip_qkv beside them)",
    "phimoe": "LayerNorm with a router that masks experts (num_local_experts, router_jitter_noise)",
    "qwen3_5_moe_text": "projections of the delta rule that are apart (in_proj_qkv, in_proj_z)",
    "qwen3_5_text": "projections of the delta rule that are apart (in_proj_qkv, in_proj_z)",
    "solar_open": "GLM-4's experts (n_routed_experts) in every one of Llama's layers",
    "vaultgemma": "Gemma 2's layers (attn_logit_softcapping) without norms behind their branches",
}
_SPELLINGS = {
    "rope_theta",
    "rope_scaling",
    "partial_rotary_factor",
    "rotary_pct",
    "rotary_emb_base",
    "hybrid_layer_ids",
}
"""Keys that families read and no class has as a field."""
_OF_FILES = {"model_type", "architectures", "dtype", "torch_dtype", "auto_map", "transformers_version"}
"""Keys that every file has."""
_NO_FUNCTION = re.compile(
    r"dropout|pdrop|token_id|token_index|init|_coef|cache|label|logits_to_keep|return_dict|pretraining_tp"
    r"|^(_|summary_|output_|gradient|problem|tokenizer|task_specific|use_return|name_or_path|add_cross|is_decoder)"
)
"""Keys of training, of tasks and of calls."""


def lacking(published: Mapping[str, Any], read: Iterable[str]) -> str:
    """End of a sentence that begins with the model type. read: the model types that are read."""
    name = str(published.get("model_type"))
    given = {**_defaults(name), **published}
    needed = [f"{what} ({key})" for key, what in _LACKING.items() if given.get(key)]
    needed += [_CLASSES[name]] if name in _CLASSES else []
    settings = [key for key, value in published.items() if _is_setting(key, value)]
    unread = _beyond(published, read)
    if same := [other for other in read if _class_of(name) and _class_of(other) == _class_of(name)]:
        return f", which transformers computes by {_class_of(name)}; set model_type: {same[0]}"
    parts = [f", which needs what is not here: {', '.join(needed)}"] if needed else []
    if unread:
        parts.append(f"; of its settings no family here has {_listed(published, unread)}")
    if parts:
        return "".join(parts)
    if not settings:
        return ", and no settings by which to say what it needs"
    missing = {name: _beyond(published, [name]) for name in sorted(read)}
    nearest, beyond = min(missing.items(), key=lambda pair: (len(pair[1]), len(_defaults(pair[0]))))
    if beyond:
        return f"; the nearest family, {nearest}, has no {_listed(published, beyond)}"
    return (
        f"; its settings ({_listed(published, settings)}) are {nearest}'s too, but what its class computes with them is not "
        "known here"
    )


def _listed(published: Mapping[str, Any], keys: list[str]) -> str:
    values = {key: published[key] for key in keys}
    shown = [key if isinstance(value, dict) else f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return first_few(shown, 8)


def _class_of(name: str) -> object:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(name)


def _defaults(name: str) -> dict[str, Any]:
    """Values that transformers' class of this type takes for keys that are absent; none where there is no class."""
    from transformers import CONFIG_MAPPING

    if name not in CONFIG_MAPPING:
        return {}
    fields = dataclasses.fields(CONFIG_MAPPING[name])
    return {field.name: field.default for field in fields if field.default is not dataclasses.MISSING}


def _is_setting(key: str, value: Any) -> bool:
    """True for a key that changes the model: its value is a section of settings, or not 0, false or empty."""
    given = bool(value) and (
        isinstance(value, (bool, int, float, str)) or (isinstance(value, dict) and "_config" in key)
    )
    return given and key not in _OF_FILES and not _NO_FUNCTION.search(key)


def _beyond(published: Mapping[str, Any], read: Iterable[str]) -> list[str]:
    """Settings that none of the classes of these types has under any spelling."""
    from transformers import CONFIG_MAPPING

    known = {*_LACKING, *_SPELLINGS}
    for kind in (CONFIG_MAPPING[name] for name in read):
        known |= {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    name = str(published.get("model_type"))
    if name in CONFIG_MAPPING:  # its class may have spellings of its own
        known |= {its for usual, its in CONFIG_MAPPING[name].attribute_map.items() if usual in known}
    return [key for key, value in published.items() if _is_setting(key, value) and key not in known]
