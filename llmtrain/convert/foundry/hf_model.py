"""A model in Hugging Face format inside LLM Foundry's YAML (`hf_causal_lm`): its config.json as our `model` section.

Types that `llmtrain import` reads (models/hf) are read by the same code. GPT-2, GPT-Neo and OPT are of a nearby architecture here,
which trains from new weights alone.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.base import Problem
from llmtrain.config.regular_file import read_json
from llmtrain.convert.foundry.settings import Settings
from llmtrain.errors import UserError

PUBLISHED: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("hf_configs.yaml").read_text(encoding="utf-8")
)
"""Model -> its config.json on the Hugging Face hub, as far as it differs from the class's defaults."""

_ALIASES = {"meta-llama-3-8b": "llama-3-8b", "meta-llama-3.1-8b": "llama-3.1-8b", "llama-2-7b-hf": "llama-2-7b"}
_UNKNOWN = {
    "vocab_size": "???",
    "d_model": "???",
    "max_seq_len": "${data.seq_len}",
    "blocks": {"attn": {"type": "attention", "n_heads": "???", "mlp": {"d_ff": "???"}}},
    "layers": "???",
}


def read_config(model: Settings) -> dict[str, Any] | None:
    """The config.json that the section means, with its overrides; None, with a note, where it is not known here."""
    name = model.take("pretrained_model_name_or_path", str, "")
    overrides = model.take("config_overrides", dict, {})
    config = _config(model, name)
    if model.take("pretrained", bool, True):
        short = name.rpartition("/")[2].lower()
        by_name = next((kind for kind in _NEARBY if short.startswith(kind.replace("_", "-"))), None)
        kind = by_name if config is None else config.get("model_type")
        if kind in _NEARBY:
            model.left("pretrained", f"weights of type {kind} cannot be imported: no setting here computes the same")
        else:
            text = "write init_from: OUT after `llmtrain import {} OUT`; docs/models.md lists what it takes"
            model.left("pretrained", text.format(name or "HF_FOLDER"))
    if config is not None:
        return _deep(config, overrides)
    text = (
        "is not known here, and no folder with a config.json; download it and give its folder, or write the "
        "keys with ???; `llmtrain import` writes them to OUT/model.yaml for the types in docs/models.md"
    )
    model.left("pretrained_model_name_or_path", text)
    if overrides:
        model.left("config_overrides", "the settings that they replace are not known")
    return None


def hf_model(model: Settings, config: dict[str, Any] | None) -> dict[str, Any]:
    """Our `model` section; with `???` for what the user has to give where the model is not known here."""
    if config is None:
        return dict(_UNKNOWN)
    if (nearby := _NEARBY.get(config.get("model_type", ""))) is not None:
        return nearby(config, model)
    from llmtrain.models.hf.family import family_of_hf_config  # which needs torch and transformers

    try:
        section = family_of_hf_config(config).read_config(config)
    except UserError as error:
        model.left("pretrained_model_name_or_path", f"its config.json cannot be expressed here: {error}")
        return dict(_UNKNOWN)
    # Their classes draw all weights alike.
    return section | {"init": section.get("init", {}) | {"scale_residual": False}}


def _config(model: Settings, name: str) -> dict[str, Any] | None:
    file = Path(name) / "config.json"
    if name and file.is_file():
        try:
            return read_json(file)
        except ValueError as error:
            problem = Problem(model.at("pretrained_model_name_or_path"), name, f"{file} is no JSON: {error}")
            model.notes.problems.append(problem)
            return None
    short = name.rsplit("/", 1)[-1].lower()
    return PUBLISHED.get(_ALIASES.get(short, short))


def _deep(config: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    merged = dict(config)
    for key, value in overrides.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _deep(merged[key], value) if both else value
    return merged


def _gpt2(config: dict[str, Any], model: Settings) -> dict[str, Any]:
    """GPT2Config's defaults are GPT-2 small's."""
    get = config.get
    d_model, dropout = get("n_embd", 768), get("resid_pdrop", 0.1)
    _activation(model, get("activation_function", "gelu_new"), ("gelu",))
    if get("attn_pdrop", 0.1):
        model.left(
            "pretrained_model_name_or_path", f"attention weights have no dropout; GPT-2's is {get('attn_pdrop', 0.1):g}"
        )
    if get("embd_pdrop", 0.1) != dropout:
        model.left("config_overrides", f"dropout is one number; {dropout:g}, resid_pdrop, was taken")
    blocks = {"attn": _biased_block(get("n_head", 12), get("n_inner") or 4 * d_model)}
    stack = {
        "d_model": d_model,
        "max_seq_len": get("n_positions", 1024),
        "blocks": blocks,
        "layers": f"attn*{get('n_layer', 12)}",
    }
    init = {"std": get("initializer_range", 0.02), "scale_residual": True}
    return _decoder(config, stack, vocab_size=50257, eps=get("layer_norm_epsilon", 1e-5), dropout=dropout, init=init)


def _gpt_neo(config: dict[str, Any], model: Settings) -> dict[str, Any]:
    """GPTNeoConfig's defaults; scores are not scaled, and every second layer may look at a window."""
    get = config.get
    d_model = get("hidden_size", 2048)
    _activation(model, get("activation_function", "gelu_new"), ("gelu",))
    if get("attention_dropout", 0.0):
        model.left("config_overrides", "attention weights have no dropout")
    block = _biased_block(get("num_heads", 16), get("intermediate_size") or 4 * d_model)
    del block["qkv_bias"]
    block["softmax_scale"] = 1.0
    blocks = {"attn": block, "local": {**block, "sliding_window": get("window_size", 256)}}
    names = {"global": "attn", "local": "local"}
    kinds = get("attention_types") or [[["global", "local"], get("num_layers", 24) // 2]]
    layers = " ".join(f"({' '.join(names[kind] for kind in group)})*{times}" for group, times in kinds)
    used = {names[kind] for group, _ in kinds for kind in group}
    blocks = {name: value for name, value in blocks.items() if name in used}
    stack = {
        "d_model": d_model,
        "max_seq_len": get("max_position_embeddings", 2048),
        "blocks": blocks,
        "layers": layers,
    }
    init, dropout = {"std": get("initializer_range", 0.02), "scale_residual": False}, get("resid_dropout", 0.0)
    return _decoder(config, stack, vocab_size=50257, eps=get("layer_norm_epsilon", 1e-5), dropout=dropout, init=init)


def _opt(config: dict[str, Any], model: Settings) -> dict[str, Any]:
    """OPTConfig's defaults."""
    get = config.get
    dropout = get("dropout", 0.1)
    _activation(model, get("activation_function", "relu"), ("gelu",))
    if not get("do_layer_norm_before", True) or get("word_embed_proj_dim", get("hidden_size", 768)) != get(
        "hidden_size", 768
    ):
        model.left("config_overrides", "norms stand before each branch, and embeddings are d_model wide")
    if get("attention_dropout", 0.0):
        model.left("config_overrides", "attention weights have no dropout")
    if dropout:
        model.left(
            "pretrained_model_name_or_path", f"OPT's dropout of {dropout:g} leaves the embedding out; ours does not"
        )
    blocks = {"attn": _biased_block(get("num_attention_heads", 12), get("ffn_dim", 3072))}
    stack = {"d_model": get("hidden_size", 768), "max_seq_len": get("max_position_embeddings", 2048), "blocks": blocks}
    stack |= {"layers": f"attn*{get('num_hidden_layers', 12)}"}
    init = {"std": get("init_std", 0.02), "scale_residual": False}
    return _decoder(config, stack, vocab_size=50272, eps=1e-5, dropout=dropout, init=init)


def _decoder(
    config: dict[str, Any], stack: dict[str, Any], *, vocab_size: int, eps: float, dropout: float, init: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """A decoder with learned positions, LayerNorm and GELU. stack: d_model, max_seq_len, blocks and layers."""
    section = {
        **{"vocab_size": config.get("vocab_size", vocab_size), **stack, "positions": "learned"},
        "norm": {"type": "layernorm", "bias": True, "eps": eps},
        "tie_embeddings": config.get("tie_word_embeddings", True),
    }
    return section | ({"dropout": dropout} if dropout else {}) | {"init": init}


def _biased_block(n_heads: int, d_ff: int) -> dict[str, Any]:
    mlp = {"type": "gelu", "d_ff": d_ff, "bias": True}
    return {"type": "attention", "n_heads": n_heads, "qkv_bias": True, "out_bias": True, "mlp": mlp}


def _activation(model: Settings, found: str, exact: tuple[str, ...]) -> None:
    if found not in exact:
        model.left("pretrained_model_name_or_path", f"its activation is {found}; {exact[0]}, exact, is written")


_NEARBY: dict[str, Callable[[dict[str, Any], Settings], dict[str, Any]]] = {
    "gpt2": _gpt2,
    "gpt_neo": _gpt_neo,
    "opt": _opt,
}
"""model_type of config.json -> its converter."""
