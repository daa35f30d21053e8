"""Pages of docs/extending as instructions for a program: their files, their edits, their commands.

A fenced block with a language is one of three: a new file (the line before it is ``File `path`:``), an edit (``In `path`:``
and a ``diff`` block), or commands (``sh``). Hunks of an edit are separated by `@@` lines. A fence without a language is prose.
"""

import contextlib
import io
import json
import re
import runpy
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.processes import output_of

ROOT = Path(__file__).parents[2]
PAGES = [path for path in sorted((ROOT / "docs" / "extending").glob("*.md")) if path.name != "README.md"]
FIRST = ROOT / "docs" / "extending" / "README.md"
"""The page whose run the others use."""
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^(File|In) `([^`]+)`:$")


class PageError(ValueError):
    """The page breaks its own convention, or no longer fits the tree."""


@dataclass
class Example:
    """One page, in the order of its text. edits: (path, body of the diff block)."""

    title: str
    files: list[tuple[str, str]] = field(default_factory=list)
    edits: list[tuple[str, str]] = field(default_factory=list)
    commands: list[str] = field(default_factory=list)

    def apply(self, root: Path) -> None:
        """Makes the files and applies the edits below `root`. Raises PageError for what does not fit exactly."""
        for path, text in self.files:
            if (root / path).exists():
                raise PageError(f"{self.title}: {path} exists already")
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text, encoding="utf-8")
        for path, body in self.edits:
            before = (root / path).read_text(encoding="utf-8")
            (root / path).write_text(edited(before, body, f"{self.title}: {path}"), encoding="utf-8")


def parse(text: str) -> Example:
    """The example of a page. Raises PageError for a block of no known kind."""
    example = Example(text.partition("\n")[0].removeprefix("# "))
    for block in _FENCE.finditer(text):
        _, language, body = block.groups()
        lines = text[: block.start()].rstrip("\n").splitlines()
        marker = _MARKER.match(lines[-1]) if lines else None
        if marker and marker[1] == "File" and language != "diff":
            example.files.append((marker[2], body))
        elif marker and marker[1] == "In" and language == "diff":
            example.edits.append((marker[2], body))
        elif marker is None and language == "sh":
            example.commands += [line for line in body.splitlines() if line]
        elif marker or language:
            raise PageError(f"{example.title}: a block in {language or 'no language'} after {lines[-1:]}")
    return example


def edited(text: str, body: str, where: str) -> str:
    """A text with every hunk of a diff applied. Raises PageError for one whose old lines are not there exactly once."""
    for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE):
        lines = [line or " " for line in hunk.splitlines()]
        if bad := [line for line in lines if line[0] not in " -+"]:
            raise PageError(f"{where}: no line of a diff: {bad[0]}")
        old, new = ("".join(f"{line[1:]}\n" for line in lines if line[0] in kept) for kept in (" -", " +"))
        if old == new:
            raise PageError(f"{where}: a hunk that changes nothing:\n{hunk}")
        count = f"\n{text}".count(f"\n{old}")
        if count != 1:
            raise PageError(f"{where}: these lines are there {count} times, not once:\n{old}")
        text = f"\n{text}".replace(f"\n{old}", f"\n{new}")[1:]
    return text


@dataclass(frozen=True)
class Ran:
    command: str
    status: int
    text: str


def run_in_one_process(folder: Path, commands: Iterable[str]) -> list[Ran]:
    """Results of commands run one after another in one process in a folder, whose modules come first; llmtrain's through the
    function that `python -m llmtrain.cli` calls."""
    command = (sys.executable, "-m", "tests.support.contributing")
    printed = output_of(*command, cwd=folder, given=json.dumps([*commands]), PYTHONPATH=str(folder))
    return [Ran(**json.loads(line)) for line in printed.splitlines() if line.startswith('{"command"')]


def run(commands: list[str]) -> Iterator[Ran]:
    """Runs commands of the page one after another in this process, which has imported torch and Composer once."""
    for command in commands:
        words = shlex.split(command)
        assert words[:2] == ["uv", "run"], f"unlike the page's other commands: {command}"
        program, arguments = words[2], words[3:]
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                status = _program(program)(arguments)
            except SystemExit as ended:
                status = ended.code if isinstance(ended.code, int) else 1
            except Exception:
                status = 1
                traceback.print_exc()
        yield Ran(command, int(status), said.getvalue())


def _program(name: str):
    if name == "llmtrain":
        from llmtrain.cli import main

        return main
    if name == "pytest":
        import pytest

        return lambda arguments: pytest.main([*arguments, "-p", "no:cacheprovider"])
    if name == "python":
        return _script
    raise PageError(f"the page runs llmtrain, pytest and python, not {name}")


def _script(arguments: list[str]) -> int:
    [path] = arguments
    runpy.run_path(path, run_name="__main__")
    return 0


if __name__ == "__main__":  # commands as a JSON list on stdin -> a JSON line per command
    out = sys.stdout
    for ran in run(json.load(sys.stdin)):
        print(json.dumps(vars(ran)), file=out, flush=True)
