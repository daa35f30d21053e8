"""Detection of a YAML for `llmtrain train` given to `llmtrain eval`, the reverse, or LLM Foundry's, reported as one error."""

from typing import Any

from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import YamlSource

_OWN = {
    "training": ("train", "optimizer", "schedule", "checkpoint"),
    "evaluation": ("tasks", "gauntlet", "models", "convention"),
}
"""Sections that only one type of config has."""

_WANTED = {
    "training": "give one with model, data, train and optimizer, such as quickstart; this one is for `llmtrain eval`",
    "evaluation": "give one with tasks, such as quick, and what was trained as model=RUN_FOLDER",
}


_FOUNDRY = {
    *("train_loader", "eval_loader", "max_duration", "global_train_batch_size", "device_train_microbatch_size"),
    *("scheduler", "fsdp_config", "eval_interval", "save_folder", "algorithms", "icl_tasks", "tokenizer"),
}
"""Top-level keys of LLM Foundry's training YAMLs, none of which ours has."""


def is_foundry(data: dict[str, Any]) -> bool:
    """True for the shape of a training YAML of LLM Foundry."""
    return len(_FOUNDRY & data.keys()) >= 3 and not data.keys() & {"train", "data", "schedule"}


def is_foundry_evaluation(data: dict[str, Any]) -> bool:
    """True for the shape of an evaluation YAML of LLM Foundry, of a list of its tasks, or of its gauntlet."""
    models = data.get("models")
    named = isinstance(models, list) and any(isinstance(one, dict) and "model_name" in one for one in models)
    listed = bool(data.keys() & {"icl_tasks", "icl_tasks_str", "eval_gauntlet"})
    return (named or listed) and not data.keys() & {"train_loader", "train", "optimizer"}


def is_evaluation(data: dict[str, Any]) -> bool:
    """True for the shape of a YAML for `llmtrain eval`."""
    return any(key in data for key in _OWN["evaluation"]) and not any(key in data for key in _OWN["training"])


def check_config_type(source: YamlSource, wanted: str) -> None:
    """Check the type of a config. wanted: training or evaluation. Raises ConfigError for one that is clearly another."""
    inner = source.data.get("parameters")
    foreign = next((data for data in (source.data, inner) if isinstance(data, dict) and is_foundry(data)), None)
    if foreign is not None:
        what = f"is a YAML of LLM Foundry; `llmtrain migrate {source.title} > ours.yaml` translates it"
        raise ConfigError(source.title, [Problem("", None, what)])
    if is_foundry_evaluation(source.data):
        what = f"is an evaluation YAML of LLM Foundry; `llmtrain migrate {source.title} > ours.yaml` translates it"
        raise ConfigError(source.title, [Problem("", None, what)])
    found = {kind: [key for key in own if key in source.data] for kind, own in _OWN.items()}
    (other,) = found.keys() - {wanted}
    if found[other] and not found[wanted]:
        what = f"is a config for {other} (it has {', '.join(found[other])}); {_WANTED[wanted]}"
        raise ConfigError(source.title, [Problem("", None, what)])
