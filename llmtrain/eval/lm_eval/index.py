"""Names of lm-evaluation-harness's tasks, groups and tags: which file of its folders each one is.

A folder of 14,000 files is indexed in about two seconds (by lm_eval's TaskManager in seven). No code is imported, and no file is
read that is a pipe or a device.
"""

import importlib.util
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

from llmtrain.config.report import nearest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.yaml_file import TaskFiles

Kind = Literal["task", "class", "group", "tag"]
"""`class`: a task that is a Python class."""


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
        self._files = TaskFiles()
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
        return self._files.read(file)

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
    files = TaskFiles()
    for path in sorted(_yaml_files(str(folder))):
        try:
            head = files.read(Path(path))
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
