"""Reading of an LLM Foundry YAML: its shape, and its `${...}`."""

from pathlib import Path
from typing import Any

from llmtrain.config.base import Problem
from llmtrain.config.config_type import is_foundry, is_foundry_evaluation
from llmtrain.config.interpolation import resolve
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import YamlSource, read_file
from llmtrain.convert.foundry.keys import MAPPED, MISSING, NOT_NEEDED, meaning

RUN_NAME = "{run_name}"
"""Composer's placeholder, which stands for a blank `run_name` too: LLM Foundry reads that from $RUN_NAME."""

_ROOTS = {key.partition(".")[0] for key in (*MAPPED, *NOT_NEEDED, *MISSING)}


def read_foundry(path: str | Path) -> tuple[YamlSource, set[str]]:
    """The file with every interpolation resolved, and the names of top-level variables, which older files have.

    `${oc.env:NAME}` stays as it is. Raises ConfigError where the file is not LLM Foundry's or cannot be resolved.
    """
    source = read_file(path)
    inner = source.data.get("parameters")
    if isinstance(inner, dict) and (is_foundry(inner) or is_foundry_evaluation(inner)):  # MosaicML's mcli files
        source.data = inner
        prefix = "parameters."
        source.origins = {
            key.removeprefix(prefix): line for key, line in source.origins.items() if key.startswith(prefix)
        }
    # Of keys that are not needed here, such as a tokenizer's model_max_length of 10^30, a value need not be readable.
    source.problems = [found for found in source.problems if not _is_not_needed(found.path)]
    source.unreadable = {path for path in source.unreadable if not _is_not_needed(path)}
    if source.problems:
        raise ConfigError(source.title, source.problems, source.origins)
    if not (is_foundry(source.data) or is_foundry_evaluation(source.data)):
        what = "is no pretraining YAML of LLM Foundry, which has model, train_loader, optimizer, scheduler and max_duration"
        raise ConfigError(source.title, [Problem("", None, what)])
    variables = {key for key in source.data if key not in _ROOTS and f"${{{key}}}" in str(source.data)}
    for section in (source.data, source.data.get("variables") or {}):
        if isinstance(section, dict) and "run_name" in section and section["run_name"] is None:
            section["run_name"] = RUN_NAME
    source.data = _keep_environment(source.data)
    resolve(source, None)
    if source.problems:
        raise ConfigError(source.title, source.problems, source.origins)
    return source, variables


def _keep_environment(value: Any) -> Any:
    """The data with `${oc.env:…}` escaped, so that it stays for the run to read."""
    if isinstance(value, dict):
        return {key: _keep_environment(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_environment(item) for item in value]
    return value.replace("${oc.env:", "\\${oc.env:") if isinstance(value, str) else value


def _is_not_needed(path: str) -> bool:
    found = meaning(path.removeprefix("parameters."))
    return found is not None and found.kind == "not needed"
