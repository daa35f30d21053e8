"""Programs that measure llmtrain: `python -m benchmarks NAME …`; without a name, all of them."""

import importlib
import re
import sys
from difflib import get_close_matches
from pathlib import Path

from llmtrain.errors import UserError, exit_with

PROGRAMS = {
    path.stem: f"benchmarks.programs.{path.parent.name}.{path.stem}"
    for path in sorted((Path(__file__).parent / "programs").glob("*/*.py"))
    if "def main(" in path.read_text(encoding="utf-8")
}
"""Modules by the names of programs."""


def summary(name: str) -> str:
    """First line of a program's docstring, which is not imported for it."""
    path = Path(__file__).parents[1] / f"{PROGRAMS[name].replace('.', '/')}.py"
    found = re.match(r'"""(.*?)(?:\n\n|""")', path.read_text(encoding="utf-8"), re.S)
    return " ".join(found[1].split()) if found else ""


def main(argv: list[str] | None = None) -> int | None:
    given = sys.argv[1:] if argv is None else argv
    if not given or given[0] in ("-h", "--help"):
        print("usage: python -m benchmarks NAME …\n")
        print("\n".join(f"  {name:18} {summary(name)}" for name in PROGRAMS))
        return 0 if given else 2
    name = given[0]
    if name not in PROGRAMS:
        near = get_close_matches(name, PROGRAMS, 1)
        raise UserError(f"benchmarks {name}: no such program; {f'is it {near[0]}?' if near else '--help lists them'}")
    return importlib.import_module(PROGRAMS[name]).main(given[1:])


if __name__ == "__main__":
    exit_with(main)
