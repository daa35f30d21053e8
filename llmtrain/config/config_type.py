"""Detection of a YAML for `llmtrain train` given to `llmtrain eval`, or the reverse, reported as one error."""

from __future__ import annotations

from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import YamlSource

_OWN = {
    "training": ("train", "optimizer", "schedule", "checkpoint"),
    "evaluation": ("tasks", "gauntlet", "models", "convention"),
}
"""Sections that only one type of config has."""

_WANTED = {
    "training": "give one with model, data, train and optimizer, such as yamls/quickstart.yaml; this one is for `llmtrain eval`",
    "evaluation": "give one with tasks, such as eval/quick.yaml, and what was trained as model=RUN_FOLDER",
}


def check_config_type(source: YamlSource, wanted: str) -> None:
    """Check the type of a config. wanted: training or evaluation. Raises ConfigError for one that is clearly of the other."""
    found = {kind: [key for key in own if key in source.data] for kind, own in _OWN.items()}
    (other,) = found.keys() - {wanted}
    if found[other] and not found[wanted]:
        what = f"is a config for {other} (it has {', '.join(found[other])}); {_WANTED[wanted]}"
        raise ConfigError(source.title, [Problem("", None, what)])
