"""Names of lm-evaluation-harness's tasks, groups and tags: which file of its folders each one is.

A folder of 14,000 files is indexed in about a second (lm_eval's TaskManager, which parses every file whole, takes seven): of
each file only the few lines are read that say what it is; the whole YAML is read for files that write them in an unusual way,
and for tasks that run. No code is imported, and no file is read that is a pipe or a device.
"""

import importlib.util
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from llmtrain.config.report import nearest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.yaml_file import included_names, parse, read_limited, read_task_file

Kind = Literal["task", "class", "group", "tag"]
"""`class`: a task that is a Python class."""

_HEAD = ("class", "group", "task", "tag")
"""Keys that say what a file is."""


@dataclass
class Entry:
    """Meaning of a name. file: None for a tag. tasks: those that a tag (or a task of that name) marks."""

    name: str
    kind: Kind
    file: Path | None
    tasks: set[str] = field(default_factory=set)


class TaskIndex:
    """Names below folders. Of two files with one name in a folder the first counts, in alphabetical order of their paths; a name
    of a later folder replaces that of an earlier one.

    unreadable: reasons, by file, why files have no names here.
    """

    def __init__(self, folders: Sequence[Path]):
        self.folders = list(folders)
        self.entries: dict[str, Entry] = {}
        self.unreadable: dict[Path, str] = {}
        self._settings: dict[Path, dict[str, Any]] = {}
        for folder in folders:
            found = (_scan_installed if folder == installed_folder() else _scan)(folder)
            self.entries |= found.entries
            self.unreadable |= found.unreadable

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> Entry:
        return self.entries[name]

    def settings(self, file: Path) -> Mapping[str, Any]:
        """Settings of a file, its includes merged. Raises EvalError."""
        if file not in self._settings:
            self._settings[file] = read_task_file(file)
        return self._settings[file]

    def hint(self, name: str) -> str:
        """Nearest names to one that is not in the index."""
        near = nearest(name, self.entries)
        folders = ", ".join(map(str, self.folders))
        hint = (
            f"did you mean {' or '.join(near)}?" if near else f"none of the {len(self.entries)} in {folders} is near it"
        )
        if self.unreadable:
            hint += (
                f" ({len(self.unreadable)} files could not be read, the first: {next(iter(self.unreadable.values()))})"
            )
        return hint


def index_of(folders: Sequence[str | Path] = ()) -> TaskIndex:
    """Index of the installed lm-evaluation-harness, if there is one, and of further folders, whose names take precedence.

    Raises EvalError for a folder that does not exist.
    """
    given = [Path(folder).expanduser() for folder in folders]
    for folder in given:
        if not folder.is_dir():
            raise EvalError(f"{folder}: no such folder")
    installed = installed_folder()
    return TaskIndex([*([installed] if installed else []), *given])


def installed_folder() -> Path | None:
    """Folder of the tasks of an installed lm-evaluation-harness, which is found without importing it."""
    spec = importlib.util.find_spec("lm_eval")
    for place in (spec and spec.submodule_search_locations) or ():
        if (folder := Path(place) / "tasks").is_dir():
            return folder
    return None


@dataclass(frozen=True)
class _Found:
    entries: dict[str, Entry]
    unreadable: dict[Path, str]


def _scan(folder: Path) -> _Found:
    entries: dict[str, Entry] = {}
    unreadable: dict[Path, str] = {}
    heads = _Heads()
    for path in sorted(_yaml_files(str(folder))):
        try:
            head = heads.read(path)
        except EvalError as error:
            unreadable[Path(path)] = str(error)
            continue
        kind: Kind | None = next((key for key in ("class", "group", "task") if key in head), None)
        name = head.get("group" if kind == "group" else "task")
        if kind is None or not isinstance(name, str) or name in entries:
            continue
        entries[name] = Entry(name, kind, Path(path))
        if kind != "group":
            for tag in _tags(head.get("tag")):
                entries.setdefault(tag, Entry(tag, "tag", None)).tasks.add(name)
    return _Found(entries, unreadable)


_scan_installed = lru_cache(maxsize=1)(_scan)


def _tags(value: Any) -> list[str]:
    tags = value if isinstance(value, list) else [value]
    return [tag for tag in tags if isinstance(tag, str) and tag]


def _yaml_files(folder: str) -> list[str]:
    found = []
    for parent, below, names in os.walk(folder):
        below[:] = [name for name in below if name not in ("__pycache__", ".ipynb_checkpoints")]
        found += [f"{parent}/{name}" for name in names if name.endswith(".yaml")]
    return found


_WANTED = rb"class|group|task|tag|include"
_LINE = re.compile(rb"""^(?:(["'])(%b)\1|(%b))[ \t]*:(?:[ \t]+(.*))?\r?$""" % (_WANTED, _WANTED), re.MULTILINE)
_TEXT = re.compile(
    rb"""(["']?)((?!(?:y|n|yes|no|on|off|true|false|null)\1$)(?:[a-z_]|\.{0,2}/)[\w/.-]*)\1(?:[ \t]+#.*)?\s*""", re.I
)
"""A value that is one plain word, quoted or not: the same text by any reading."""
_QUOTED = re.compile(
    rb"""(?:^|[:\-\[,{])[ \t]+(?:"(?:[^"\\\n]|\\[^\n])*\\?\n(?:[^"\\]|\\[\s\S])*"|'(?:[^'\n]|'')*\n(?:[^']|'')*')"""
)
"""A quoted text of several lines, which may begin with what looks like a key."""


class _Heads:
    """The keys that say what a file is, with those of its includes."""

    def __init__(self) -> None:
        self._included: dict[str, dict[str, Any]] = {}
        self._folders: dict[str, str] = {}

    def read(self, path: str) -> dict[str, Any]:
        return self._read(path, ())

    def _read(self, path: str, including: tuple[str, ...]) -> dict[str, Any]:
        try:
            data = read_limited(Path(path))
        except OSError as error:
            raise EvalError(f"{path}: {error.strerror or error}") from None
        head = _head(data, path)
        if "include" not in head:
            return head
        merged: dict[str, Any] = {}
        for name in included_names(head.pop("include"), path):
            merged |= self._inherited(os.path.normpath(os.path.join(self._folder(path), name)), (*including, path))
        return merged | head

    def _folder(self, path: str) -> str:
        """The folder of a file, without symbolic links."""
        if os.path.islink(path):
            return os.path.dirname(os.path.realpath(path))
        folder = os.path.dirname(path)
        return self._folders.get(folder) or self._folders.setdefault(folder, os.path.realpath(folder))

    def _inherited(self, path: str, including: tuple[str, ...]) -> dict[str, Any]:
        if path in including:
            raise EvalError(f"{path}: include: goes round in a circle")
        if path not in self._included:
            self._included[path] = self._read(path, including)
        return self._included[path]


def _head(data: bytes, path: str) -> dict[str, Any]:
    """The keys of one file that say what it is."""
    found: dict[str, Any] = {}
    plain = not any(_LINE.search(text[0]) for text in _QUOTED.finditer(data))
    for line in _LINE.finditer(data) if plain else ():
        key = (line[2] or line[3]).decode()
        text = _TEXT.fullmatch(line[4] or b"")
        if text:
            plain = key not in found
            found[key] = text[2].decode()
        elif key != "task" or "group" not in found:  # what a group's `task` lists does not matter here
            plain = False
        if not plain:
            break
    if found and plain:
        return found
    whole: Mapping[str, Any] = parse(data, Path(path))
    return {key: whole[key] for key in (*_HEAD, "include") if key in whole}
