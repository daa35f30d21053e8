"""Reading a YAML file as plain data, with the line of each value. No torch here."""

import io
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.base import Problem
from llmtrain.config.regular_file import open_regular
from llmtrain.config.report import ConfigError, nearest
from llmtrain.config.yaml_text import MAX_KEY, MAX_TEXT, Loader, is_merge, make_text, scalar_problem, syntax


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


def _read_text(path: str | Path) -> str:
    if os.path.isdir(path):
        raise ConfigError(str(path), [Problem("", None, f"is a folder; {_yamls_in(Path(path))}")])
    try:
        with io.TextIOWrapper(open_regular(Path(path)), encoding="utf-8") as file:
            text = file.read(MAX_TEXT + 1)
    except FileNotFoundError:
        if os.path.islink(path):
            what = f"is a link to {os.readlink(path)}, which does not exist"
            raise ConfigError(str(path), [Problem("", None, what)]) from None
        raise ConfigError(str(path), [Problem("", None, f"no such file; {_files_near(Path(path))}")]) from None
    except UnicodeDecodeError as error:
        raise ConfigError(str(path), [Problem("", None, f"is not text (byte {error.start} is not UTF-8)")]) from None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(str(path), [Problem("", None, f"cannot be read: {reason}")]) from None
    if len(text) > MAX_TEXT:
        raise ConfigError(str(path), [Problem("", None, f"has more than {MAX_TEXT} characters, which no config needs")])
    return text


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
    try:
        loader = Loader(text)
        node = loader.get_single_node()
        if node is None:
            raise ConfigError(
                source.title, [Problem("", None, "is empty; it needs name, model, data, train, optimizer")]
            )
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(
                source.title, [Problem("", None, "is not a mapping; it needs lines of the form 'key: value'")]
            )
        inspect(source, node, "")
        return loader.construct_document(node)
    except yaml.reader.ReaderError as error:
        line, bad = text.count("\n", 0, error.position) + 1, text[error.position]
        raise ConfigError(
            source.title, [Problem("", None, f"line {line}: YAML does not allow the character {bad!r}")]
        ) from None
    except yaml.MarkedYAMLError as error:
        raise ConfigError(source.title, [Problem("", None, syntax(error))]) from None


def inspect(source: YamlSource, node: yaml.Node, path: str) -> None:
    """Record the line of every entry, duplicate keys and impossible scalars, and make every key a string, as written."""
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            source.origins[join(path, index)] = item.start_mark.line + 1
            inspect(source, item, join(path, index))
    if isinstance(node, yaml.ScalarNode) and (reason := scalar_problem(node)):
        source.problems.append(Problem(path, node.value, reason))
        source.unreadable.add(path)
    if not isinstance(node, yaml.MappingNode):
        return
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or not key.value.isprintable() or not 0 < len(key.value) <= MAX_KEY:
            raise yaml.MarkedYAMLError(None, None, "a key must be a plain name", key.start_mark)
    seen: dict[str, int] = {}
    for key, value in sorted(node.value, key=lambda pair: not is_merge(pair[0])):  # what is written takes precedence
        if is_merge(key):
            for merged in value.value if isinstance(value, yaml.SequenceNode) else [value]:
                inspect(source, merged, path)
            continue
        make_text(key)
        entry, line = join(path, key.value), key.start_mark.line + 1
        if key.value in seen:
            source.problems.append(Problem(entry, None, f"given twice, first on line {seen[key.value]}; keep one"))
        seen[key.value] = source.origins[entry] = line
        inspect(source, value, entry)


def join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)
