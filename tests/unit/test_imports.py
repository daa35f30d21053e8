"""Every module imports, and every name that is imported from one of ours exists, in functions too."""

import ast
import functools
import importlib
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from tests.support.processes import modules_after
from tests.support.ranks import warm

ROOT = Path(__file__).parents[2]
OURS = ("llmtrain", "benchmarks", "scripts")
ELSEWHERE = {
    "benchmarks/peers": "programs for environments of their own",
    "benchmarks/turns": "waits for its turn when it is imported as Python's sitecustomize",
}
"""Folders that are not imported, and why."""


def unimportable(root: Path, modules: list[str], files: list[str]) -> list[str]:
    """What fails, one line each, in one process, forked from one that has imported torch and Composer, which takes longest.
    modules: dotted names. files: relative paths whose imports of our names are looked up without running them."""
    with warm().Pool(1) as pool:
        return pool.apply_async(_unimportable, (root, modules, files)).get(timeout=600)


def _unimportable(root: Path, modules: list[str], files: list[str]) -> list[str]:
    sys.path.insert(0, str(root))
    imported = {name: _module(name) for name in modules}
    found = [
        f"{name}: {traceback.format_exception_only(error)[-1].strip()}"
        for name, error in imported.items()
        if isinstance(error, BaseException)
    ]
    exists = functools.cache(_exists)
    for path in files:
        for line, *wanted in _imported_names((root / path).read_text(encoding="utf-8")):
            if not exists(*wanted):
                found.append(f"{path}:{line}: no {'.'.join(filter(None, wanted))}")
    return found


def _module(name: str) -> ModuleType | BaseException:
    try:
        return importlib.import_module(name)
    except BaseException as error:  # also SystemExit of a program that runs at import
        return error


def _imported_names(text: str) -> Iterator[tuple[int, str, str | None]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] in OURS:
            yield from ((node.lineno, node.module or "", alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names if alias.name.split(".")[0] in OURS)


def _exists(parent: str, name: str | None) -> bool:
    found = _module(parent)
    if isinstance(found, BaseException):
        return False
    return name in (None, "*") or hasattr(found, name) or not isinstance(_module(f"{parent}.{name}"), BaseException)


def sources(*folders: str) -> list[str]:
    found = [str(path.relative_to(ROOT)) for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return [path for path in found if not path.startswith(tuple(f"{folder}/" for folder in ELSEWHERE))]


def test_every_module_imports_and_every_imported_name_exists():
    ours = sources(*OURS)
    modules = [path.removesuffix(".py").removesuffix("/__init__").replace("/", ".") for path in ours]
    assert len(modules) > 300
    assert (
        unimportable(ROOT, [name for name in modules if not name.endswith("__main__")], ours + sources("tests")) == []
    )


@pytest.mark.parametrize(
    ("modules", "without"),
    [
        ("llmtrain.data.shards.checks", {"torch", "streaming", "numpy"}),
        ("llmtrain.data.tokenize.encode, llmtrain.data.prepare", {"torch", "transformers"}),  # processes that prepare
        ("llmtrain.eval.task, llmtrain.eval.report.gauntlet, llmtrain.eval.decontamination.decontaminate", {"torch"}),
    ],
)
def test_what_needs_no_heavy_library_imports_none(modules, without):
    assert not without & modules_after(f"import {modules}")


def test_modules_and_names_that_do_not_exist_are_reported(tmp_path):
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "broken.py").write_text("import no_such_package\n")
    lazy = "def later():\n    from llmtrain.errors import NoSuchError, UserError\n    import llmtrain.no_such_module\n"
    (tmp_path / "lazy.py").write_text(lazy)
    assert unimportable(tmp_path, ["scripts.broken", "llmtrain.errors"], ["lazy.py"]) == [
        "scripts.broken: ModuleNotFoundError: No module named 'no_such_package'",
        "lazy.py:2: no llmtrain.errors.NoSuchError",
        "lazy.py:3: no llmtrain.no_such_module",
    ]
