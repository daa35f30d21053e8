"""The floors of the package, by every import of its files: late ones and those for type checking count too."""

import ast
from fnmatch import fnmatch
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import llmtrain

ROOT = Path(llmtrain.__file__).parents[1]
ORDER = """
errors logs bytecode progress versions config pictures tables kernels models objectives schema distributed start data checkpoint
flops adapt plan generate convert eval serve train bench doctor commands cli
"""
FLOORS: tuple[str, ...] = tuple(ORDER.split())
"""From low to high: a file imports from its own floor and from lower ones."""

PROGRAMS = ("llmtrain.__main__",)
"""Entry points, above every floor: nothing imports them."""

WITHOUT_TORCH = (
    "llmtrain.errors",
    "llmtrain.logs",
    "llmtrain.bytecode",
    "llmtrain.progress",
    "llmtrain.start",
    "llmtrain.versions",
    "llmtrain.config.*",
    "llmtrain.schema.*",
    "llmtrain.convert.foundry.*",
    "llmtrain.models.config",
    "llmtrain.models.backends",
    "llmtrain.models.sections.*",
    "llmtrain.objectives.sections",
    "llmtrain.kernels.*.spec",
    "llmtrain.kernels.registry",
    "llmtrain.commands.*",
    "llmtrain.cli",
)
"""Modules that can be imported without PyTorch, so that `check` answers, and the command line parses, at once."""

VENDOR = {"hip", "gcnArchName", "get_device_capability", "get_device_properties"}
"""Attributes of torch by which a program learns vendor or architecture."""
ASKS_FOR_VENDOR = {
    "llmtrain.kernels.platform": "the one place",
    "llmtrain.bench.machine": "prints the version of ROCm",
    "llmtrain.train.callbacks.throughput": "the number of compute units, for the peak of a part of a GPU",
}


class Import(NamedTuple):
    module: str
    line: int
    at_import_time: bool


@cache
def files() -> dict[str, Path]:
    found = {}
    for path in (ROOT / "llmtrain").rglob("*.py"):
        found[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    return found


@cache
def tree(module: str) -> ast.Module:
    return ast.parse(files()[module].read_text(encoding="utf-8"))


@cache
def nodes(module: str) -> list[tuple[ast.AST, bool]]:
    """Every node of a file, and whether importing it executes the node."""
    found, left = [], list[tuple[ast.AST, bool]]([(tree(module), True)])
    while left:
        node, now = left.pop()
        for child in ast.iter_child_nodes(node):
            late = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or (
                isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            )
            left.append((child, now and not late))
            found.append(left[-1])
    return found


@cache
def imports(module: str) -> list[Import]:
    found = []
    for node, now in nodes(module):
        if isinstance(node, ast.Import):
            found += [Import(alias.name, node.lineno, now) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{module}:{node.lineno}: imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                found.append(Import(full if full in files() else node.module, node.lineno, now))
    return found


def floor(module: str) -> int:
    return len(FLOORS) if module in PROGRAMS or module == "llmtrain" else FLOORS.index(module.split(".")[1])


def test_every_file_has_a_floor():
    assert {module.split(".")[1] for module in files() if module not in PROGRAMS and module != "llmtrain"} == set(
        FLOORS
    )


def test_imports_point_down():
    wrong = [
        f"{module}:{found.line} imports {found.module}"
        for module in files()
        for found in imports(module)
        if found.module in files() and found.module != "llmtrain" and floor(found.module) > floor(module)
    ]
    assert wrong == []


def test_no_circle_among_files():
    direct = {module: {found.module for found in imports(module)} & files().keys() - {module} for module in files()}

    def reached(start: str) -> set[str]:
        seen, left = set(), [start]
        while left:
            new = direct[left.pop()] - seen
            seen |= new
            left += new
        return seen

    below = {module: reached(module) for module in files()}
    circles = {
        frozenset(other for other in below[module] if module in below[other])
        for module in files()
        if module in below[module]
    }
    assert sorted(map(sorted, circles)) == []


def reaches(module: str, library: str) -> list[str] | None:
    """A chain of imports, all executed at import time, from a module to a library; None if there is none."""
    chains, seen = [[module]], {module}
    while chains:
        chain = chains.pop(0)
        for found in imports(chain[-1]):
            if not found.at_import_time:
                continue
            if found.module.split(".")[0] == library:
                return [*chain, library]
            if found.module in files() and found.module not in seen:
                seen.add(found.module)
                chains.append([*chain, found.module])
    return None


@pytest.mark.parametrize("library", ["torch", "triton", "composer", "streaming", "transformers"])
def test_what_only_reads_configs_imports_no_torch(library):
    light = [module for module in files() if any(fnmatch(module, pattern) for pattern in WITHOUT_TORCH)]
    assert len(light) > 40
    assert [chain for module in light if (chain := reaches(module, library))] == []


HEAVY = {
    "composer": "llmtrain.train.*",
    "torchmetrics": "llmtrain.train.* llmtrain.objectives.*",
    "streaming": "llmtrain.train.* llmtrain.data.loader.*",
    "transformers": "llmtrain.models.hf.* llmtrain.convert.*",
    "torchao": "llmtrain.adapt.*",
    "lm_eval": "llmtrain.eval.lm_eval*",
    "matplotlib": "llmtrain.data.inspect.pictures",
    **dict.fromkeys(
        ("wandb", "datasets", "peft", "scipy", "pandas", "tensorboard", "torchvision", "pyarrow", "boto3"), ""
    ),
}
"""Libraries whose import takes half a second to fifteen, and where one of our files may import them when it is imported."""


@pytest.mark.parametrize("library", HEAVY)
def test_heavy_libraries_are_imported_where_they_are_needed(library):
    users = {
        module
        for module in files()
        for found in imports(module)
        if found.at_import_time and found.module.split(".")[0] == library
    }
    assert [module for module in users if not any(fnmatch(module, allowed) for allowed in HEAVY[library].split())] == []


NOT_TRAINING = (
    *("llmtrain.bench.*", "llmtrain.doctor.*", "llmtrain.commands.check", "llmtrain.commands.describe"),
    *("llmtrain.plan.describe", "llmtrain.plan.report", "llmtrain.plan.scaling"),
)


def test_the_whole_config_is_read_in_few_files_of_training():
    """Others take the sections that they need."""
    found = {
        module
        for module in files()
        if not any(fnmatch(module, pattern) for pattern in NOT_TRAINING)
        for node, _ in nodes(module)
        if isinstance(node, ast.arg | ast.AnnAssign) and isinstance(node.annotation, ast.Name)
        if node.annotation.id == "Config"
    }
    assert 15 < len(found) <= 27, sorted(found)


def test_only_train_has_composer():
    users = {module for module in files() if any(found.module.split(".")[0] == "composer" for found in imports(module))}
    assert {module for module in users if not module.startswith("llmtrain.train.")} == set()


def test_only_the_platform_asks_for_the_vendor():
    askers = {
        module
        for module in files()
        if any(isinstance(node, ast.Attribute) and node.attr in VENDOR for node, _ in nodes(module))
    }
    assert askers - ASKS_FOR_VENDOR.keys() == set()
