"""Resolution of `${section.key}` and `${oc.env:NAME}` by OmegaConf. No torch here."""

from __future__ import annotations

import re
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from llmtrain.config.base import Problem, Section
from llmtrain.config.report import ConfigError, nearest
from llmtrain.config.schema_tree import with_defaults
from llmtrain.config.yaml_source import YamlSource, join


def resolve(source: YamlSource, schema: type[Section]) -> None:
    """Fill in the defaults and replace every `${...}` by its value; one without a value is reported and marked unreadable.

    Raises ConfigError for an interpolation that cannot be parsed.
    """
    filled = with_defaults(schema, source.data)
    try:
        tree = OmegaConf.create(filled)
    except OmegaConfBaseException as error:
        path = getattr(error, "full_key", None) or ""
        raise ConfigError(source.title, [Problem(path, None, _first_line(error))], source.origins) from None
    source.data = _plain(source, tree, "", _dotted(filled))


def _plain(source: YamlSource, node: Any, path: str, known: list[str]) -> Any:
    if not isinstance(node, (DictConfig, ListConfig)):
        return node
    keys = [str(key) for key in node] if isinstance(node, DictConfig) else range(len(node))
    values = {}
    for key in keys:
        entry = join(path, key)
        try:
            missing = OmegaConf.is_missing(node, key)
            value = "???" if missing else node[key]  # type: ignore[index]
        except OmegaConfBaseException as error:
            raw = OmegaConf.to_container(node, resolve=False)[key]  # type: ignore[index, call-overload]
            source.unreadable.add(entry)
            wanted = _unknown_key(error)
            if wanted is None or wanted in str(raw):  # else a value on the way is wrong, and is reported itself
                source.problems.append(Problem(entry, raw, _interpolation(error, known)))
            values[key] = raw
            continue
        if missing:
            source.problems.append(Problem(entry, "???", "stands for a value that you have to give"))
            source.unreadable.add(entry)
        values[key] = _plain(source, value, entry, known)
    return values if isinstance(node, DictConfig) else list(values.values())


def _interpolation(error: OmegaConfBaseException, known: list[str]) -> str:
    key = _unknown_key(error)
    if key is not None:
        near = nearest(key, known)
        hint = f"; did you mean ${{{near[0]}}}?" if near else ""
        return f"there is no '{key}' to refer to{hint}"
    text = re.sub(r"^\w+ raised while resolving interpolation: ", "", _first_line(error)).strip('"')
    return f"cannot be resolved: {text[:1].lower()}{text[1:]}"


def _unknown_key(error: OmegaConfBaseException) -> str | None:
    """The missing setting that an interpolation refers to; None for other errors."""
    match = re.fullmatch(r"Interpolation key '(.*)' not found", _first_line(error))
    return match[1] if match else None


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _dotted(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [name for key, item in value.items() for name in _dotted(item, join(path, key))]
