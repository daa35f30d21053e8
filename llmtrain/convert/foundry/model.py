"""LLM Foundry's `model` section: MPT's, as ours. Models in Hugging Face format are in hf_model.py."""

import math
import re
from typing import Any

from llmtrain.convert.foundry.hf_model import hf_model, read_config
from llmtrain.convert.foundry.keys import MAPPED, meaning
from llmtrain.convert.foundry.settings import Note, Notes, Settings, note_unread

_EXACT_ACTIVATIONS = {("mptmlp", "gelu"): "gelu", ("mptglu", "gelu"): "geglu", ("mptglu", "silu"): "swiglu"}
_NAMES = ("mpt_causal_lm", "hf_causal_lm")


def read_model(model: Settings, seq_len: int | None) -> dict[str, Any]:
    """Our `model` section."""
    name = model.take("name", str, "mpt_causal_lm")
    if name == "hf_causal_lm":
        config = read_config(model)
        section = (
            published_mpt(Settings(config, model.notes, f"{model.path}.pretrained_model_name_or_path"))
            if config and config.get("model_type") == "mpt"
            else hf_model(model, config)
        )
        return _with_seq_len(section, seq_len)
    if name not in _NAMES:
        model.left("name", f"only {' and '.join(_NAMES)} are pretrained here; read as mpt_causal_lm")
    return _with_seq_len(_mpt(model, seq_len), seq_len)


def _with_seq_len(section: dict[str, Any], seq_len: int | None) -> dict[str, Any]:
    if seq_len is not None and section.get("max_seq_len") == seq_len:
        section["max_seq_len"] = "${data.seq_len}"
    return section


def published_mpt(settings: Settings) -> dict[str, Any]:
    """Our section from MPT's config.json, which has the keys of LLM Foundry's own section among others."""
    section = _mpt(settings, None)
    for path, value in settings.unread():
        key = path.removeprefix(f"{settings.path}.")
        if (found := meaning(f"model.{key}")) and found.kind == "missing" and value not in found.harmless:
            settings.notes.left.append(Note(path, value, found.text))
    return section


def _mpt(model: Settings, seq_len: int | None) -> dict[str, Any]:
    d_model, n_layers = model.take("d_model", int, 2048), model.take("n_layers", int, 24)
    norm_type = model.take("norm_type", str, "low_precision_layernorm").lower()
    rms = "rms" in norm_type
    if norm_type.removeprefix("low_precision_").removeprefix("triton_") not in ("layernorm", "rmsnorm"):
        model.left("norm_type", f"{norm_type} is unknown here; {'rmsnorm' if rms else 'layernorm'} is written")
    bias = not model.take("no_bias", bool, False)
    attention = model.section("attn_config")
    positions = model.take("learned_pos_emb", bool, True)
    inside = attention.data.get("alibi") or attention.data.get("rope")
    block = _block(model, d_model)
    blocks, layers = _stack(model, block, d_model, n_layers)
    section: dict[str, Any] = {
        "vocab_size": model.take("vocab_size", int, 50368),
        "d_model": d_model,
        "max_seq_len": model.take("max_seq_len", int, seq_len or 2048),
        "positions": "learned" if positions and not inside else "none",
        "norm": {"type": "rmsnorm" if rms else "layernorm", "bias": bias and not rms},
        "blocks": blocks,
        "layers": layers,
        "tie_embeddings": model.take("tie_word_embeddings", bool, True),
    }
    section["norm"]["eps"] = model.take("norm_eps", float, 1e-5)
    if (cap := model.take("final_logit_softcapping", float)) is not None:
        section["logit_softcap"] = cap
    residual, embedding = model.take("resid_pdrop", float, 0.0), model.take("emb_pdrop", float, 0.0)
    if residual != embedding:
        key = "resid_pdrop" if residual else "emb_pdrop"
        model.left(key, f"dropout is one number, on the embedding and on every branch; {residual:g} was taken for both")
    if residual:
        section["dropout"] = residual
    section["init"] = _init(model.section("init_config"), d_model, n_layers)
    return section


def _block(model: Settings, d_model: int) -> dict[str, Any]:
    """One block, from the settings of the model or of an override of them."""
    attention, ffn = model.section("attn_config"), model.section("ffn_config")
    n_heads = model.take("n_heads", int, 16)
    block: dict[str, Any] = {"type": "attention", "n_heads": n_heads}
    kind = attention.take("attn_type", str, "multihead_attention")
    kv = attention.take("kv_n_heads", int)
    kv = 1 if kind == "multiquery_attention" else kv if kind == "grouped_query_attention" else None
    if kv is not None and kv != n_heads:
        block["n_kv_heads"] = kv
    if (head_dim := model.take("head_dim", int)) is not None:
        block["head_dim"] = head_dim
    if (position := _position(attention)) is not None:
        block["position"] = position
    if attention.take("qk_ln", bool, False):
        block["qk_norm"] = "full"
    elif attention.take("qk_gn", bool, False):
        block["qk_norm"] = "head"
    attention.take("qk_gn", bool)
    for theirs, ours in (
        ("clip_qkv", "clip_qkv"),
        ("softmax_scale", "softmax_scale"),
        ("attn_logit_softcapping", "softcap"),
    ):
        if value := attention.take(theirs, float):
            block[ours] = value
    window = attention.take("sliding_window_size", int, -1)
    if window != -1:
        block["sliding_window"] = window + 1
    bias = not model.take("no_bias", bool, False)
    if model.take("attention_bias", bool, bias):
        block["qkv_bias"] = True
    if bias:
        block["out_bias"] = True
    block["mlp"] = _mlp(model, ffn, d_model, bias)
    return block


def _position(attention: Settings) -> dict[str, Any] | None:
    alibi, rope = attention.take("alibi", bool, False), attention.take("rope", bool, False)
    if attention.take("nope", bool, False):
        return {"type": "none"}
    if alibi:
        most = attention.take("alibi_bias_max", float, 8.0)
        return {"type": "alibi"} | ({"max_bias": most} if most != 8 else {})
    if not rope:
        return None
    theta = attention.take("rope_theta", float, 10000.0)
    position: dict[str, Any] = {"type": "rotary"} | ({"theta": theta} if theta != 10000 else {})
    attention.take("rope_dail_config", dict)
    attention.take("rope_hf_config", dict)
    if attention.data.get("rope_impl", "dail") == "dail":
        if (attention.data.get("rope_dail_config") or {}).get("type", "original") != "original":
            attention.left("rope_dail_config", "rotary positions without xpos's decay are written")
        return position
    scaling = attention.data.get("rope_hf_config") or {}
    kind = scaling.get("type", "no_scaling")
    if kind == "linear":
        position["scaling"] = {"type": "linear", "factor": float(scaling.get("factor", 1.0))}
    elif kind == "llama3":
        position["scaling"] = _llama3_scaling(scaling)
    elif kind != "no_scaling":
        attention.left("rope_hf_config", "scaling is linear or llama3; none is written")
    return position


def _llama3_scaling(found: dict[str, Any]) -> dict[str, Any]:
    """Our `position.scaling`, from the names of Hugging Face's rope_scaling."""
    scaling: dict[str, Any] = {"type": "llama3", "factor": float(found.get("factor", 1.0))}
    for key, ours in (("low_freq_factor", "low_freq_factor"), ("high_freq_factor", "high_freq_factor")):
        if key in found:
            scaling[ours] = float(found[key])
    if "original_max_position_embeddings" in found:
        scaling["original_max_seq_len"] = int(found["original_max_position_embeddings"])
    return scaling


def _mlp(model: Settings, ffn: Settings, d_model: int, bias: bool) -> dict[str, Any]:
    ratio = model.take("expansion_ratio", float, 4.0)
    d_ff = ffn.take("ffn_hidden_size", int) or int(d_model * ratio)
    kind = ffn.take("ffn_type", str, "mptmlp")
    activation = ffn.take("ffn_act_fn", dict, {"name": "gelu"})
    act = activation.get("name", "gelu")
    ours = _EXACT_ACTIVATIONS.get((kind, act))
    if kind not in ("mptmlp", "mptglu"):
        ours = "gelu"
        ffn.left("ffn_type", "there are no experts and no fused layers; a dense MLP with GELU is written")
    elif ours is None or activation.get("approximate", "none") != "none":
        ours = ours or ("gelu" if kind == "mptmlp" else "swiglu")
        ffn.left("ffn_act_fn", f"activations are the exact GELU, or SiLU where gated; type: {ours} is written")
    return {"type": ours, "d_ff": d_ff} | ({"bias": True} if bias else {})


def _stack(model: Settings, block: dict[str, Any], d_model: int, n_layers: int) -> tuple[dict[str, Any], str]:
    """Our `blocks` and `layers`."""
    overrides = model.take("block_overrides", dict)
    if not overrides:
        return {"attn": block}, f"attn*{n_layers}"
    blocks: dict[str, Any] = {"attn": block}
    for name, changes in (overrides.get("overrides") or {}).items():
        path = f"{model.at('block_overrides')}.overrides.{name}"
        merged = Settings(_merge(model.data, changes), Notes(), model.path)
        blocks[_block_name(name)] = _block(merged, d_model)
        model.notes.problems += merged.notes.problems
        _note_override(model.notes, changes, path, "model")
    layers = _pattern(overrides.get("order") or [])
    if (times := overrides.get("repeat", 1)) != 1:
        layers = f"({layers})*{times}"
    used = set(re.findall(r"[A-Za-z_]\w*", layers))
    return {name: section for name, section in blocks.items() if name in used}, layers


def _note_override(notes: Notes, changes: dict[str, Any], path: str, base: str) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and f"{base}.{key}" not in MAPPED:
            _note_override(notes, value, f"{path}.{key}", f"{base}.{key}")
        elif (found := meaning(f"{base}.{key}")) is None or found.kind != "mapped":
            rest = Settings({key: value}, scratch := Notes(), base)
            note_unread(rest)
            notes.left += [note.__class__(f"{path}.{key}", note.value, note.text) for note in scratch.left]
            notes.harmless += [note.__class__(f"{path}.{key}", note.value, note.text) for note in scratch.harmless]


def _pattern(order: list[dict[str, Any]]) -> str:
    parts = []
    for item in order:
        times = f"*{item['repeat']}" if item.get("repeat", 1) != 1 else ""
        nested = item.get("order")
        parts.append(
            f"({_pattern(nested)}){times}" if nested else _block_name(str(item.get("name", "default"))) + times
        )
    return " ".join(parts)


def _block_name(name: str) -> str:
    name = re.sub(r"\W", "_", "attn" if name == "default" else name)
    return name if re.match(r"[A-Za-z_]", name) else f"block_{name}"


def _merge(base: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        old = merged.get(key)
        both = isinstance(value, dict) and isinstance(old, dict)
        merged[key] = _merge(old, value) if both else value  # type: ignore[arg-type]
    return merged


def _init(init: Settings, d_model: int, n_layers: int) -> dict[str, Any]:
    """Normal weights: Kaiming's, LLM Foundry's default, or of one standard deviation. What cannot be said so is noted."""
    name = init.take("name", str, "kaiming_normal_")
    gain, mode = init.take("init_gain", float, 0.0), init.take("fan_mode", str, "fan_in")
    nonlinearity = init.take("init_nonlinearity", str, "relu")
    std = {
        "baseline_": init.take("init_std", float, 0.02),
        "small_init_": math.sqrt(2 / (5 * d_model)),
        "neox_init_": math.sqrt(2 / (5 * d_model)),
    }.get(name)
    section: dict[str, Any] = {"type": "kaiming"} if std is None else {"std": float(f"{std:.9g}")}
    if name in ("kaiming_normal_", "kaiming_uniform_"):
        if mode != "fan_in":
            init.left("fan_mode", "the standard deviation follows from a matrix's inputs")
        if not (nonlinearity == "relu" or (nonlinearity == "leaky_relu" and gain == 0)):
            init.left("init_nonlinearity", "kaiming is written, sqrt(2 / inputs): the gain of relu")
    if name == "kaiming_uniform_":
        init.left("name", "weights are normal; kaiming, of the same standard deviation, is written")
    elif std is None and name != "kaiming_normal_":
        init.left("name", "weights are normal, of one standard deviation or Kaiming's; kaiming is written")
    embedding, expected = init.take("emb_init_std", float), std or math.sqrt(2 / d_model)
    if embedding is not None and not math.isclose(embedding, expected, rel_tol=1e-4):
        init.left("emb_init_std", f"embeddings start as all weights do, with {expected:.4g}")
    if init.take("emb_init_uniform_lim", (float, int, list)) is not None:
        init.left("emb_init_uniform_lim", f"embeddings start normal, with {expected:.4g}")
    return section | {"scale_residual": _scale_residual(init, name, n_layers)}


def _scale_residual(init: Settings, name: str, n_layers: int) -> bool:
    """Ours divides the std of residual projections by sqrt(2 * layers), or not at all."""
    ours = math.sqrt(2 * n_layers)
    found = init.take("init_div_is_residual", (bool, int, float, str), True)
    if name == "neox_init_":
        found = n_layers / math.sqrt(10)
    if isinstance(found, bool):
        return found
    number = float(found) if str(found).replace(".", "", 1).isdigit() else ours
    if math.isclose(number, ours, rel_tol=1e-3) or number == 1:
        return number != 1
    key = "name" if name == "neox_init_" else "init_div_is_residual"
    init.left(
        key, f"residual projections are divided by sqrt(2 * layers) = {ours:.4g}, or not; there it was {number:.4g}"
    )
    return True
