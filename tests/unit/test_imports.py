"""Every module imports, and every name that is imported from one of ours exists, in functions too."""

import sys
from pathlib import Path

import pytest

from tests.support.processes import modules_after, output_of

ROOT = Path(__file__).parents[2]
OURS = ("llmtrain", "benchmarks", "scripts")
ELSEWHERE = {
    "benchmarks/peers": "programs for environments of their own",
    "benchmarks/turns": "waits for its turn when it is imported as Python's sitecustomize",
}
"""Folders that are not imported, and why."""

PROGRAM = """
import ast, importlib, importlib.util, sys, traceback

def module(name):
    try:
        return importlib.import_module(name)
    except BaseException as error:  # also SystemExit of a program that runs at import
        return error

def imported_names(path):
    for node in ast.walk(ast.parse(open(path, encoding="utf-8").read(), path)):
        if isinstance(node, ast.ImportFrom) and not node.level and node.module.split(".")[0] in OURS:
            yield from ((node.lineno, node.module, alias.name) for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, None) for alias in node.names if alias.name.split(".")[0] in OURS)

def exists(parent, name):
    found = module(parent)
    if isinstance(found, BaseException):
        return False
    return name is None or name == "*" or hasattr(found, name) or not isinstance(module(f"{parent}.{name}"), BaseException)

OURS, (modules, files) = sys.argv[1].split(","), (part.split(",") for part in sys.argv[2:])
for name in modules:
    if isinstance(error := module(name), BaseException):
        print(f"{name}: {traceback.format_exception_only(error)[-1].strip()}")
seen = {}
for path in files:
    for line, *wanted in imported_names(path):
        key = tuple(wanted)
        if key not in seen:
            seen[key] = exists(*key)
        if not seen[key]:
            print(f"{path}:{line}: no {'.'.join(filter(None, key))}")
"""


def unimportable(root: Path, modules: list[str], files: list[str]) -> list[str]:
    """What fails, one line each, by one interpreter (importing torch and Composer takes longest). modules: dotted names.
    files: relative paths whose imports of our names are looked up without running them."""
    command = (sys.executable, "-c", PROGRAM, ",".join(OURS), ",".join(modules), ",".join(files))
    return output_of(*command, cwd=root).splitlines()


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
