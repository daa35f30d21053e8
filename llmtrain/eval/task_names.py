"""Tasks that an entry of `tasks` in an eval YAML names: ours, and those of lm-evaluation-harness. Reads no data."""

import fnmatch
import glob
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import NoReturn

from llmtrain.config.report import nearest
from llmtrain.config.shipped import eval_yamls
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.groups import Group, Leaf, by_file, by_name
from llmtrain.eval.lm_eval.index import TaskIndex, index_of
from llmtrain.eval.lm_eval.yaml_file import parse, read_limited

LM_EVAL = "lm_eval:"
"""Before a name: lm-evaluation-harness's task of that name, also where one of ours has it."""

Named = Path | Leaf | Group
"""The YAML of a task of ours; a task or a group of lm-evaluation-harness."""

_YAML = (".yaml", ".yml")
_KEYS = {"task", "group", "include", "class", "dataset_path", "output_type", "custom_dataset"}
"""Top-level keys of lm-evaluation-harness's files, none of which a task of ours has."""


class TaskNames:
    """Names of tasks. folders: those of lm-evaluation-harness's files beside an installed one."""

    def __init__(self, folders: Sequence[str | Path] = ()):
        self._folders = list(folders)

    @cached_property
    def _index(self) -> TaskIndex:
        return index_of(self._folders)

    def find(self, text: str) -> list[Named]:
        """All that a name, pattern or path stands for. Raises EvalError where there is nothing.

        A name of ours takes precedence over one of lm-evaluation-harness.
        """
        path = Path(text).expanduser()
        if text.startswith(LM_EVAL):
            return list(self._in_index(text))
        if path.is_file():
            return [self._file(path)]
        if path.suffix in _YAML:
            return self._files(path)
        ours = eval_yamls("tasks")
        if text in ours:
            return [ours[text]]
        if _is_pattern(text):
            mine = [ours[name] for name in sorted(fnmatch.filter(ours, text))]
            theirs = sorted(set(fnmatch.filter(self._index.entries, text)) - ours.keys())
            if not mine and not theirs:
                self._unknown(text)
            return [*mine, *(one for name in theirs for one in by_name(name, self._index))]
        return list(self._in_index(text))

    def _files(self, path: Path) -> list[Named]:
        """Files of a pattern; of a path without a file, itself: whoever reads it says what there is instead."""
        if not _is_pattern(str(path)):
            return [path]
        found = sorted(Path(one) for one in glob.glob(str(path), recursive=True))
        if not found:
            raise EvalError(f"there is no file {path}")
        return [self._file(one) for one in found]

    def _file(self, path: Path) -> Named:
        if not is_lm_eval_file(path):
            return path
        return by_file(path, lambda: index_of([*self._folders, path.parent]))  # a group's tasks may be beside it

    def _in_index(self, text: str) -> list[Leaf | Group]:
        index, name = self._index, text.removeprefix(LM_EVAL)
        names = [name] if name in index else sorted(fnmatch.filter(index.entries, name)) if _is_pattern(name) else []
        if not names:
            self._unknown(text)
        return [one for name in names for one in by_name(name, index)]

    def _unknown(self, text: str) -> NoReturn:
        if Path(text).expanduser().is_dir():
            raise EvalError(f"{text} is a folder; {Path(text) / '*.yaml'} names all task files in it")
        index, name = self._index, text.removeprefix(LM_EVAL)
        ours = eval_yamls("tasks") if name == text else {}
        if near := nearest(name, ours):
            hint = f"did you mean {' or '.join(near)}?"
        elif index.folders:
            hint = f"of lm-evaluation-harness's, {index.hint(name)}"
        else:
            hint = "lm-evaluation-harness's are found where it is installed, or with lm_eval_folders: [FOLDER]"
            hint = f"tasks are: {', '.join(sorted(ours))}; {hint}" if ours else hint
        what = f"no task matches '{name}'" if _is_pattern(name) else f"there is no task '{name}'"
        raise EvalError(f"{what}: {hint} (or give the path of a .yaml)")


def is_lm_eval_file(path: Path) -> bool:
    """True for a task or group file of lm-evaluation-harness, by its keys. One that is no YAML is not."""
    try:
        keys = parse(read_limited(path), path).keys()
    except (OSError, EvalError):
        return False
    return bool(keys & _KEYS) and not keys & {"type", "source"}


def _is_pattern(text: str) -> bool:
    return any(sign in text for sign in "*?[")
