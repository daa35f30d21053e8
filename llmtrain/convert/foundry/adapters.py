"""LLM Foundry's `model.peft_config` (peft's LoraConfig) as our `adapt.lora`."""

from collections.abc import Mapping
from typing import Any

from llmtrain.convert.foundry.settings import Settings

_ATTENTION = {"q_proj": "*.wqkv.q", "k_proj": "*.wqkv.k", "v_proj": "*.wqkv.v", "Wqkv": "*.wqkv"}
_OUT = {"o_proj": "*.mixer.wo", "out_proj": "*.mixer.wo", "down_proj": "*.mlp.w_out"}
_TARGETS = _ATTENTION | _OUT | {"gate_proj": "*.w_in.gate", "lm_head": "head", "embed_tokens": "embed", "wte": "embed"}
"""Names of peft's modules -> of our layers; `up_proj` besides, which is a part where there is a gate."""
_ALL = "all-linear"
_NO_EFFECT = {"peft_type", "task_type", "inference_mode", "base_model_name_or_path"}


def read_adapters(model: Settings, section: Mapping[str, Any]) -> dict[str, Any] | None:
    """Our `adapt` section; None without adapters, and with a note for those that are no plain LoRA of known names. section: our
    `model`."""
    given = model.data.get("peft_config")
    if not given or not isinstance(given, dict):
        return None
    config = Settings(given, model.notes, model.at("peft_config"))
    gated = "glu" in str([block.get("mlp") for block in section.get("blocks", {}).values()])
    targets = _TARGETS | {"up_proj": "*.w_in.up" if gated else "*.mlp.w_in"}
    lora: dict[str, Any] = {"rank": config.take("r", int, 8), "alpha": config.take("lora_alpha", (int, float), 8)}
    for theirs, ours in {"lora_dropout": "dropout", "use_rslora": "rslora", "use_dora": "dora"}.items():
        if value := config.take(theirs, bool if theirs.startswith("use") else float):
            lora[ours] = value
    groups = dict[str, dict[str, Any]]()
    for theirs, ours in {"rank_pattern": "rank", "alpha_pattern": "alpha"}.items():
        for name, value in config.take(theirs, dict, {}).items():
            groups.setdefault(name, {})[ours] = value
    named = config.take("target_modules", (str, list))
    named = [named] if isinstance(named, str) else named
    wanted = named if named and named != [_ALL] else []
    config.skip(*_NO_EFFECT)
    unknown = [name for name in [*wanted, *groups] if name not in targets]
    unknown += [key for key, value in config.unread() if value not in (None, False, [], {}, "none")]
    if given.get("peft_type", "LORA") != "LORA" or not named or unknown:
        return None
    if wanted:
        lora["targets"] = [targets[name] for name in wanted]
    if groups:
        lora["groups"] = [{"match": targets[name], **values} for name, values in groups.items()]
    model.skip("peft_config")
    return {"lora": lora}
