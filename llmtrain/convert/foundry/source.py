"""Reading of an LLM Foundry YAML: its shape, and its `${...}`."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmtrain.config.base import Problem
from llmtrain.config.config_type import is_foundry, is_foundry_evaluation
from llmtrain.config.report import ConfigError
from llmtrain.config.yaml_source import YamlSource, read_file
from llmtrain.convert.foundry.keys import MAPPED, MISSING, NOT_NEEDED, meaning
from llmtrain.errors import first_line

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
    if source.problems:
        raise ConfigError(source.title, source.problems, source.origins)
    if not (is_foundry(source.data) or is_foundry_evaluation(source.data)):
        what = "is no pretraining YAML of LLM Foundry, which has model, train_loader, optimizer, scheduler and max_duration"
        raise ConfigError(source.title, [Problem("", None, what)])
    variables = {key for key in source.data if key not in _ROOTS and f"${{{key}}}" in str(source.data)}
    for section in (source.data, source.data.get("variables") or {}):
        if isinstance(section, dict) and "run_name" in section and section["run_name"] is None:
            section["run_name"] = RUN_NAME
    source.data = _resolved(source)
    return source, variables


def _resolved(source: YamlSource) -> dict[str, Any]:
    problems: list[Problem] = []
    try:
        tree = OmegaConf.create(_keep_environment(source.data))
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", None) or ""
        raise ConfigError(source.title, [Problem(path, None, first_line(error))], source.origins) from None

    def plain(node: Any, path: str) -> Any:
        if not OmegaConf.is_config(node):
            return node
        keys = list(node) if OmegaConf.is_dict(node) else range(len(node))
        values = {}
        for key in keys:
            entry = f"{path}.{key}" if path else str(key)
            try:
                values[key] = "???" if OmegaConf.is_missing(node, key) else plain(node[key], entry)
            except OmegaConfBaseException as error:
                problems.append(Problem(entry, None, f"cannot be resolved: {first_line(error)}"))
        return values if OmegaConf.is_dict(node) else list(values.values())

    data = plain(tree, "")
    if problems:
        raise ConfigError(source.title, problems, source.origins)
    return data


def _keep_environment(value: Any) -> Any:
    """The data with `${oc.env:…}` escaped, so that OmegaConf leaves it for the run to read."""
    if isinstance(value, dict):
        return {key: _keep_environment(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_keep_environment(item) for item in value]
    return value.replace("${oc.env:", "\\${oc.env:") if isinstance(value, str) else value


def _is_not_needed(path: str) -> bool:
    found = meaning(path.removeprefix("parameters."))
    return found is not None and found.kind == "not needed"
