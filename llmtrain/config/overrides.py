"""Overrides `a.b=c` of the command line, which replace settings of the file. No torch here."""

import re
from typing import Any, get_origin

import yaml

from llmtrain.config.base import Problem, Section
from llmtrain.config.report import suggest
from llmtrain.config.schema_tree import entry_type, select_alternative
from llmtrain.config.yaml_source import YamlSource, inspect
from llmtrain.config.yaml_text import MAX_DEPTH, MAX_KEY, MAX_TEXT, Loader, syntax_reason


def apply_override(source: YamlSource, override: str, schema: type[Section]) -> None:
    """Apply one override `a.b=c`. c is YAML and replaces the whole value of the file.

    Sections that the file lacks are created; list entries and named entries (blocks, streams) must exist. null removes a named
    entry. An unknown last key is reported by the decoder.
    """
    path, equals, text = override.partition("=")
    keys = re.sub(r"\[([0-9]+)\]", r".\1", path.strip()).split(".")
    if not equals or len(keys) >= MAX_DEPTH or not all(key.isprintable() and 0 < len(key) <= MAX_KEY for key in keys):
        return _refuse(source, override.strip()[:MAX_KEY] or "an empty override", None, "is not of the form a.b=value")
    given = YamlSource("", {})
    try:
        value = _read(given, ".".join(keys), text)
    except yaml.YAMLError as error:
        reason = syntax_reason(error) if isinstance(error, yaml.MarkedYAMLError) else "a character YAML does not allow"
        return _refuse(source, ".".join(keys), text, f"is not a YAML value ({reason}); try quotes around it")
    at: Any = source.data
    kind: Any = schema
    for depth, key in enumerate(keys):
        last, above, path = depth == len(keys) - 1, ".".join(keys[:depth]), ".".join(keys[: depth + 1])
        kind = select_alternative(kind, at)
        index: Any = key
        if isinstance(at, list):
            index = int(key) if re.fullmatch("[0-9]{1,6}", key) else len(at)
            if index >= len(at):
                return _refuse(source, path, None, f"there is no such entry: {above} has {len(at)} entries")
        elif not isinstance(at, dict):
            return _refuse(source, ".".join(keys), value, f"there is no such entry: {above} is not a mapping")
        elif key not in at and get_origin(kind) is dict and (value is None or not last):
            return _refuse(source, path, key, f"there is no such entry; {suggest(key, at, 'there are')}")
        if last:
            _forget(source, path)
            source.problems += given.problems
            source.unreadable |= given.unreadable
            if value is None and get_origin(kind) is dict:
                del at[index]
                return None
            at[index] = value
        elif isinstance(at, dict) and at.get(index) is None:
            at[index] = {}
        source.origins.setdefault(path, "override")
        kind = entry_type(kind, index)
        at = at[index]


def _read(given: YamlSource, path: str, text: str) -> Any:
    if len(text) > MAX_TEXT:
        raise yaml.MarkedYAMLError(None, None, f"more than {MAX_TEXT} characters")
    loader = Loader(text)
    node = loader.get_single_node()
    if node is None:
        return None
    inspect(given, node, path)
    return loader.construct_document(node)


def _refuse(source: YamlSource, path: str, found: Any, message: str) -> None:
    source.problems.append(Problem(path, found, message))
    source.origins[path] = "override"


def _forget(source: YamlSource, path: str) -> None:
    """Drop the origins and problems of a value and of everything below it, which an override replaces."""

    def replaced(other: str) -> bool:
        return other == path or other.startswith(path + ".")

    source.origins = {other: place for other, place in source.origins.items() if not replaced(other)}
    source.problems = [problem for problem in source.problems if not replaced(problem.path)]
    source.unreadable = {other for other in source.unreadable if not replaced(other)}
