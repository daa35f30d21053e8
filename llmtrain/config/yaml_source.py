"""Reading a YAML file as plain data, with the line of each value. No torch here."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.base import Problem
from llmtrain.config.report import ConfigError, nearest


@dataclass
class YamlSource:
    """A config as written, before it is decoded.

    title: the file as the user named it.
    origins: dotted path -> line number in the file, or 'override'.
    problems: errors found so far.
    unreadable: paths without a usable value, such as an interpolation that refers to nothing.
    """

    title: str
    data: dict[str, Any]
    origins: dict[str, int | str] = field(default_factory=dict)
    problems: list[Problem] = field(default_factory=list)
    unreadable: set[str] = field(default_factory=set)


def read_file(path: str | Path) -> YamlSource:
    """Read a YAML file. Raises ConfigError when there is nothing to decode: no file, no YAML, no mapping."""
    source = YamlSource(str(path), {})
    source.data = _parse(source, _read_text(path))
    return source


class Loader(yaml.SafeLoader):
    """Scalars follow YAML 1.2, as editors read it: `on` and `yes` are text, 010 is not octal, 1e-4 is a number."""

    yaml_implicit_resolvers: dict = {}


for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(?:0|[1-9][0-9_]*)|0x[0-9a-fA-F]+", "-+0123456789"),
    ("float", r"[-+]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan", "-+0123456789."),
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("merge", r"<<", "<"),
):
    Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(rf"(?:{_pattern})\Z"), list(_first))


def _read_text(path: str | Path) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(str(path), [Problem("", None, f"no such file; {_files_near(Path(path))}")]) from None
    except IsADirectoryError:
        raise ConfigError(str(path), [Problem("", None, f"is a folder; {_yamls_in(Path(path))}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("", None, f"is not text (byte {error.start} is not UTF-8)")]) from None
    except OSError as error:
        raise ConfigError(str(path), [Problem("", None, f"cannot be read: {os.strerror(error.errno or 0)}")]) from None


def _files_near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    near = nearest(path.name, [file.name for file in folder.iterdir() if file.suffix in (".yaml", ".yml")])
    return f"did you mean {folder / near[0]}?" if near else _yamls_in(folder)


def _yamls_in(folder: Path) -> str:
    names = sorted(str(file) for file in folder.iterdir() if file.suffix in (".yaml", ".yml"))
    return f"{folder} has {', '.join(names)}" if names else f"{folder} has no YAML files"


def _parse(source: YamlSource, text: str) -> dict[str, Any]:
    """The file's data; raises ConfigError for what is not one YAML mapping."""
    if bad := Loader.NON_PRINTABLE.search(text):
        line = text.count("\n", 0, bad.start()) + 1
        raise ConfigError(
            source.title, [Problem("", None, f"line {line}: YAML does not allow the character {bad[0]!r}")]
        )
    loader = Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(
                source.title, [Problem("", None, "is empty; it needs name, model, data, train, optimizer")]
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                source.title, [Problem("", None, "is not a mapping; it needs lines of the form 'key: value'")]
            )
        _locate(source, node, "", ())
        return loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source.title, [Problem("", None, _syntax(error))]) from None


def _syntax(error: yaml.MarkedYAMLError) -> str:
    mark = error.problem_mark or error.context_mark
    place = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    hint = "; indent with spaces, not tabs" if "'\\t'" in (error.problem or "") else ""
    since = (
        f" {error.context} that starts on line {error.context_mark.line + 1}"
        if error.context and error.context_mark
        else ""
    )
    return f"{place}{error.problem}{since}{hint}"


def _locate(source: YamlSource, node: yaml.Node, path: str, parents: tuple[yaml.Node, ...]) -> None:
    """Record the line of every entry and the duplicate keys, and make every key a string, as written."""
    if any(node is parent for parent in parents):
        raise yaml.MarkedYAMLError(None, None, "an alias (*) to a value that contains it", node.start_mark)
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            source.origins[join(path, index)] = item.start_mark.line + 1
            _locate(source, item, join(path, index), (*parents, node))
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        if not isinstance(key, yaml.ScalarNode):
            raise yaml.MarkedYAMLError(None, None, "a key must be a plain name", key.start_mark)
        if key.tag == "tag:yaml.org,2002:merge":
            continue
        key.tag = "tag:yaml.org,2002:str"
        entry, line = join(path, key.value), key.start_mark.line + 1
        if key.value in seen:
            source.problems.append(Problem(entry, None, f"given twice, first on line {seen[key.value]}; keep one"))
        seen[key.value] = source.origins[entry] = line
        _locate(source, value, entry, (*parents, node))


def join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
