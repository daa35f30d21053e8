"""Overrides `a.b=c` of the command line, which replace settings of the file. No torch here."""

from __future__ import annotations

import re
from typing import Any, get_origin

import yaml

from llmtrain.config.base import Problem, Section
from llmtrain.config.report import suggest
from llmtrain.config.schema_tree import entry_type, select_alternative
from llmtrain.config.yaml_source import Loader, YamlSource


def apply_override(source: YamlSource, override: str, schema: type[Section]) -> None:
    """Apply one override `a.b=c`. c is YAML and replaces the whole value of the file.

    Sections that the file lacks are created; list entries and named entries (blocks, streams) must exist. An unknown last
    key is reported by the decoder.
    """
    path, equals, text = override.partition("=")
    keys = re.sub(r"\[(\d+)\]", r".\1", path.strip()).split(".")
    if not equals or not all(keys):
        return _refuse(source, override, None, "is not of the form a.b=value")
    try:
        value = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        reason = error.problem if isinstance(error, yaml.MarkedYAMLError) else "a character YAML does not allow"
        return _refuse(source, ".".join(keys), text, f"is not a YAML value ({reason}); try quotes around it")
    at: Any = source.data
    kind: Any = schema
    for depth, key in enumerate(keys):
        last, above, path = depth == len(keys) - 1, ".".join(keys[:depth]), ".".join(keys[: depth + 1])
        kind = select_alternative(kind, at)
        index: Any = key
        if isinstance(at, list):
            index = int(key) if key.isdigit() else len(at)
            if index >= len(at):
                return _refuse(source, path, None, f"there is no such entry: {above} has {len(at)} entries")
        elif not isinstance(at, dict):
            return _refuse(source, ".".join(keys), value, f"there is no such entry: {above} is not a mapping")
        elif key not in at and get_origin(kind) is dict and not last:
            return _refuse(source, path, key, f"there is no such entry; {suggest(key, at, 'there are')}")
        if last:
            _forget(source, path)
            at[index] = value
        elif isinstance(at, dict) and at.get(index) is None:
            at[index] = {}
        source.origins.setdefault(path, "override")
        kind = entry_type(kind, index)
        at = at[index]


def _refuse(source: YamlSource, path: str, found: Any, message: str) -> None:
    source.problems.append(Problem(path, found, message))
    source.origins[path] = "override"


def _forget(source: YamlSource, path: str) -> None:
    """Drop the origins and problems of a value and of everything below it, which an override replaces."""
    for other in [other for other in source.origins if other == path or other.startswith(path + ".")]:
        del source.origins[other]
    source.problems = [p for p in source.problems if p.path != path and not p.path.startswith(path + ".")]
