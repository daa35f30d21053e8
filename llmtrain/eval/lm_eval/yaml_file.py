"""Task and group files of lm-evaluation-harness, with their includes merged. Nothing is imported for `!function`.

Values are those that lm-evaluation-harness reads: YAML 1.1, in which `no` is false and 1e-4 is a text. The limits are the
house's (config/yaml_text.py).
"""

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from llmtrain.config.regular_file import open_regular
from llmtrain.config.report import type_name
from llmtrain.config.yaml_text import MAX_TEXT, check_extent, syntax
from llmtrain.eval.errors import EvalError


@dataclass(frozen=True)
class Function:
    """A reference to Python code: what `!function utils.process_docs` stands for.

    file: the .py file it would come from, beside the YAML that writes it.
    """

    reference: str
    file: Path

    def __str__(self) -> str:
        return f"{self.reference} of {self.file}"


def read_task_file(path: str | Path) -> dict[str, Any]:
    """`TaskFiles.read` of one file."""
    return TaskFiles().read(Path(path).expanduser())


class TaskFiles:
    """Reader of files, of which those that others include are parsed once."""

    def __init__(self) -> None:
        self._included: dict[str, dict[str, Any]] = {}
        self._folders: dict[str, str] = {}

    def read(self, path: Path) -> dict[str, Any]:
        """Settings of a file; those of its `include` files, in their order, come first, and its own replace them.

        Raises EvalError with file and line for text that is no YAML mapping, and for includes that are missing or circular.
        """
        return self._merged(self._real(str(path)), ())

    def _real(self, path: str) -> str:
        """A path without links; of a folder's many files the folder is looked up once."""
        folder, name = os.path.split(path)
        if os.path.islink(path):
            return os.path.realpath(path)
        if folder not in self._folders:
            self._folders[folder] = os.path.realpath(folder)
        return f"{self._folders[folder]}/{name}"

    def _merged(self, path: str, including: tuple[str, ...]) -> dict[str, Any]:
        if path in including:
            chain = " -> ".join((*including[including.index(path) :], path))
            raise EvalError(f"{including[-1]}: include: goes round in a circle: {chain}")
        settings = _mapping(Path(path), including[-1] if including else None)
        merged: dict[str, Any] = {}
        for name in _included_names(settings.pop("include"), path) if "include" in settings else ():
            file = self._real(os.path.join(os.path.dirname(path), name))
            if file not in self._included:
                self._included[file] = self._merged(file, (*including, path))
            merged |= {key: value for key, value in self._included[file].items() if key != "task_list"}
        return merged | settings


def _included_names(value: Any, file: str) -> list[str]:
    names = value if isinstance(value, list) else [value]
    for name in names:
        if not isinstance(name, str) or not name:
            raise EvalError(f"{file}: include: expected a path or a list of paths, found {type_name(name)}")
    return names


def _mapping(path: Path, included_by: str | None) -> dict[str, Any]:
    try:
        return dict(parse(read_limited(path), path))
    except (OSError, ValueError) as error:
        if isinstance(error, EvalError):
            raise
        lead = f"{included_by}: include: " if included_by else ""
        reason = getattr(error, "strerror", None) or error
        raise EvalError(f"{lead}{path}: {'no such file' if isinstance(error, FileNotFoundError) else reason}") from None


def read_limited(path: Path) -> bytes:
    """Content of a file, no more of it than `parse` takes and one byte. Raises OSError, also for a pipe or a device."""
    with open_regular(path) as file:
        return file.read(_MOST_BYTES + 1)


_MOST_BYTES = 4 * MAX_TEXT


def parse(data: bytes, path: Path) -> dict[str, Any]:
    """The mapping of one file, includes as written. Raises EvalError with file and line."""
    if len(data) > _MOST_BYTES:
        raise EvalError(f"{path}: is too long; at most {_MOST_BYTES} bytes are allowed")
    loader = _loader_class()(data)
    try:
        loader.folder = path.parent
        check_extent(yaml.parse(data, Loader=_loader_class()))
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            raise EvalError(
                f"{path}: {'is not a mapping of settings' if node else 'is empty'}; it needs task, or group"
            )
        made = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        raise EvalError(f"{path}: {syntax(error)}") from None
    except yaml.reader.ReaderError as error:
        raise EvalError(f"{path}: is no text that YAML allows, at byte {error.position}: {error.reason}") from None
    except ValueError as error:  # what a constructor cannot convert: a date 2024-02-31, an integer of 5000 digits
        raise EvalError(f"{path}: has a value that YAML cannot read: {error}") from None
    finally:
        loader.dispose()
    for key in made:
        if not isinstance(key, str):
            raise EvalError(f"{path}: a key must be a name, found {key!r}; put it in quotes")
    return made


@cache
def _loader_class() -> Any:
    """The loader of plain data with `!function`; libyaml's where PyYAML has it, which is ten times as fast."""

    base: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class Loader(base):
        folder: Path

        def function(self, node: Any) -> Function:
            reference = self.construct_scalar(node)
            module = reference.rpartition(".")[0]
            if not module:
                problem = f"!function needs module.name, found '{reference}'"
                raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
            up = re.match(r"(?:\.{1,2}/)*", module)
            folders = up[0] if up else ""  # ../utils.f: the dots before a slash are no dots between modules
            return Function(reference, self.folder / f"{folders}{module[len(folders) :].replace('.', '/')}.py")

    Loader.add_constructor("!function", Loader.function)
    return Loader
