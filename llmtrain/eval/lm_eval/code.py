"""Python functions that a task file names by `!function`: imported only from folders that the user allows."""

import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.yaml_file import Function

_INSTALLED = ("lm_eval", "tasks")
"""Folder of lm-evaluation-harness's own tasks; their files import one another as modules below this package."""


def references(value: Any, path: str = "") -> Iterator[tuple[str, Function]]:
    """(dotted path, function) of every `!function` in a task file's content."""
    if isinstance(value, Function):
        yield path, value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from references(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list):
        for number, inner in enumerate(value):
            yield from references(inner, f"{path}.{number}")


def refusal(found: Iterable[tuple[str, Function]], allow_code: Sequence[Path]) -> Iterator[str]:
    """Reason why functions may not be imported, one for each file of code."""
    allowed = [folder.expanduser().resolve() for folder in allow_code]
    refused: dict[Path, list[tuple[str, str]]] = {}
    for key, function in found:
        if not any(function.file.resolve().is_relative_to(folder) for folder in allowed):
            refused.setdefault(function.file, []).append((key, function.reference))
    for file, uses in refused.items():
        keys = ", ".join(dict.fromkeys(key for key, _ in uses))
        names = ", ".join(dict.fromkeys(name for _, name in uses))
        yield f"{keys} {'is' if len(uses) == 1 else 'are'} code ({names} of {file}); --allow-code {file.resolve().parent} runs it"


def load_function(function: Function) -> Callable[..., Any]:
    """Import a function. Raises EvalError where its file, or what that imports, is missing or fails."""
    name = function.reference.rpartition(".")[2]
    if not function.file.is_file():
        raise EvalError(f"!function {function.reference}: there is no file {function.file}")
    try:
        found = getattr(_module(function.file.resolve()), name, None)
    except (Exception, SystemExit) as error:  # a program from elsewhere may fail in any way
        reason = str(error) or type(error).__name__
        raise EvalError(f"!function {function.reference}: {function.file} cannot be imported: {reason}") from None
    if not callable(found):
        raise EvalError(f"!function {function.reference}: {function.file} defines no function {name}")
    return found


def _module(file: Path) -> Any:
    name = _module_name(file)
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses and pickle look it up
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
    return sys.modules[name]


def _module_name(file: Path) -> str:
    """Name below lm_eval.tasks for its own files, so that their relative imports work; else one that nothing else has."""
    parts = file.with_suffix("").parts
    for at in range(len(parts) - 2, 0, -1):
        if parts[at - 1 : at + 1] == _INSTALLED:
            return ".".join(parts[at - 1 :])
    return f"llmtrain_task_code.{str(file).replace('.', '_')}"
