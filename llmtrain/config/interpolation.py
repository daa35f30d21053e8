"""Resolution of OmegaConf's interpolations: `${section.key}`, `${oc.env:NAME}`, these inside one another. No torch here.

References to settings are followed here, so that each is followed once, in an order without circles, and what they make has a
limit; everything else in a text is read by OmegaConf.
"""

import re
from typing import Any

from llmtrain.config.base import Problem, Section
from llmtrain.config.limits import time_limit
from llmtrain.config.report import nearest
from llmtrain.config.schema_tree import with_defaults
from llmtrain.config.yaml_source import YamlSource, join
from llmtrain.config.yaml_text import MAX_TEXT, MAX_VALUES, text_problem
from llmtrain.errors import UserError

_MAX_CHAIN = 100
"""References and mappings from a value to what it stands for in the end."""
_MAX_HARD = 100
"""Texts for OmegaConf."""
_HARD_SECONDS = 5.0
"""Time for one of them: OmegaConf follows a reference anew wherever it stands."""
_REFERENCE = re.compile(r"(?<!\\)\$\{([\w-]+(?:\.[\w-]+|\[[0-9]+\])*)\}")
_IN_A_NAME = re.compile(rf"(?<!\\)(\$\{{[\w.\[\]-]*){_REFERENCE.pattern}")
"""A reference that is a part of another's name."""


class _Unresolved(Exception):
    """A value that cannot be had. None for a message: what it refers to is reported itself."""

    def __init__(self, message: str | None):
        self.message = message


def resolve(source: YamlSource, schema: type[Section] | None) -> None:
    """Fill in the defaults and replace every `${...}` by its value; one without a value is reported and marked unreadable.

    schema: None for a file of another program, where `???` stays, and null may be a part of a text, as OmegaConf has it.
    """
    filled = source.data if schema is None else with_defaults(schema, source.data)
    source.data = _Resolver(source, filled, foreign=schema is None).value((), filled)


Path = tuple[str | int, ...]


class _Resolver:
    def __init__(self, source: YamlSource, tree: dict[str, Any], foreign: bool = False):
        self.source, self.tree, self.foreign = source, tree, foreign
        self.resolved: dict[Path, Any] = {}
        self.open: list[Path] = []
        self.wrong: set[str] = set()
        """Paths without a usable value, and the mappings and lists that hold one."""
        for path in source.unreadable:
            self._mark_wrong(path)
        self.characters = self.values = self.hard = 0

    def value(self, path: Path, written: Any) -> Any:
        """The resolved value of the entry at `path`."""
        if path in self.resolved:
            return self.resolved[path]
        if path in self.open:
            raise _Unresolved("recursive interpolation: its value is needed to find its value")
        if len(self.open) >= _MAX_CHAIN:
            raise _Unresolved(f"more than {_MAX_CHAIN} values that refer to one another")
        self.open.append(path)
        try:
            if isinstance(written, dict):
                value: Any = {key: self.value((*path, key), item) for key, item in written.items()}
            elif isinstance(written, list):
                value = [self.value((*path, index), item) for index, item in enumerate(written)]
            else:
                value = self._entry(path, written) if isinstance(written, str) else written
        finally:
            self.open.pop()
        self.resolved[path] = value
        return value

    def _entry(self, path: Path, written: str) -> Any:
        try:
            if written == "???" and not self.foreign:
                raise _Unresolved("stands for a value that you have to give")
            if "${" not in written:
                return written
            value = self._fill(path, written)
            if isinstance(value, str):
                self.characters += len(value)
                if self.characters > MAX_TEXT:
                    raise _Unresolved(f"the interpolations make more than {MAX_TEXT} characters")
                if reason := text_problem(value):
                    raise _Unresolved(reason)
            return value
        except _Unresolved as error:
            dotted = ".".join(map(str, path))
            self.source.unreadable.add(dotted)
            self._mark_wrong(dotted)
            if error.message:
                self.source.problems.append(Problem(dotted, written, error.message))
            return written

    def _mark_wrong(self, dotted: str) -> None:
        while dotted not in self.wrong:
            self.wrong.add(dotted)
            dotted = dotted.rpartition(".")[0]

    def _fill(self, path: Path, text: str) -> Any:
        """The text with every `${...}` replaced; the value itself where the text is one interpolation."""
        for _ in range(text.count("${")):
            text = _IN_A_NAME.sub(lambda found: f"{found[1]}{self._reference(found[2])}", text, count=1)
        values = [self._reference(name) for name in _REFERENCE.findall(text)]
        if _REFERENCE.fullmatch(text):
            return values[0]
        if "\\" in text or "${" in _REFERENCE.sub("", text):
            return self._by_omegaconf(path)
        for value in values:
            if (value is None and not self.foreign) or isinstance(value, (dict, list)):
                kind = "null" if value is None else "a mapping or list"
                raise _Unresolved(f"refers to {kind}, which cannot be a part of a text")
        words = (str(value).lower() if isinstance(value, bool) else str(value) for value in values)
        return _REFERENCE.sub(lambda _: next(words), text)

    def _by_omegaconf(self, path: Path) -> Any:
        """The value of the entry at `path`, whose references to other entries are resolved."""
        # Imported here: it costs a third of a second, and few configs need more than references.
        from omegaconf import OmegaConf
        from omegaconf.errors import OmegaConfBaseException

        self.hard += 1
        if self.hard > _MAX_HARD:
            raise _Unresolved(f"more than {_MAX_HARD} interpolations beyond ${{section.key}}")
        try:
            with time_limit(_HARD_SECONDS, "it"):
                node: Any = OmegaConf.create(self._so_far((), self.tree))
                for key in path:
                    node = node[key]
        except UserError as error:
            self.hard = _MAX_HARD
            raise _Unresolved(f"cannot be resolved: {error}") from None
        except OmegaConfBaseException as error:
            raise _Unresolved(self._reason(error)) from None
        except RecursionError:
            raise _Unresolved("interpolations inside one another go too deep") from None
        return OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node

    def _so_far(self, path: Path, written: Any) -> Any:
        """The entries with the values that are known, in which no interpolation is left."""
        if path in self.resolved:
            value = self.resolved[path]
            return value.replace("${", "\\${") if isinstance(value, str) else value
        if isinstance(written, dict):
            return {key: self._so_far((*path, key), item) for key, item in written.items()}
        if isinstance(written, list):
            return [self._so_far((*path, index), item) for index, item in enumerate(written)]
        return written

    def _reason(self, error: Exception) -> str:
        text = next(iter(str(error).splitlines()), "")
        if match := re.fullmatch(r"Interpolation key '(.*)' not found", text):
            return f"there is no '{match[1]}' to refer to{self._hint(match[1])}"
        text = re.sub(r"^\w+ raised while resolving interpolation: ", "", text).strip('"')
        return f"cannot be resolved: {text[:1].lower()}{text[1:]}"

    def _reference(self, name: str) -> Any:
        """The resolved value of the setting of this name."""
        at: Any = self.tree
        path: Path = ()
        for key in re.sub(r"\[([0-9]+)\]", r".\1", name).split("."):
            if isinstance(at, str):  # an interpolation on the way, which may stand for a section
                at = self.value(path, at)
            index: Any = int(key) if isinstance(at, list) and re.fullmatch("[0-9]{1,6}", key) else key
            known = index in at if isinstance(at, dict) else isinstance(at, list) and index in range(len(at))
            if not known:
                if ".".join(map(str, path)) in self.wrong and not isinstance(at, (dict, list)):
                    raise _Unresolved(None)
                raise _Unresolved(f"there is no '{name}' to refer to{self._hint(name)}")
            at, path = at[index], (*path, index)
        value = self.value(path, at)
        if ".".join(map(str, path)) in self.wrong:
            raise _Unresolved(None)
        self.values += _count(value)
        if self.values > MAX_VALUES:
            raise _Unresolved(f"the interpolations make more than {MAX_VALUES} values")
        return value

    def _hint(self, name: str) -> str:
        near = nearest(name, _dotted(self.tree))
        return f"; did you mean ${{{near[0]}}}?" if near else ""


def _count(value: Any) -> int:
    """Values in a value."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(_count, items))


def _dotted(value: Any, path: str = "") -> list[str]:
    if not isinstance(value, dict):
        return [path]
    return [name for key, item in value.items() for name in _dotted(item, join(path, key))]
