"""docs/tutorial.md as a reader follows it: its files, its commands in order, and what they print."""

import contextlib
import math
import re
import shlex
import sys
from pathlib import Path

import pytest

from llmtrain.cli import main
from tests.cli.test_train import command
from tests.support.project import Project

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
HOME = "/home/you/stories"
"""The reader's folder, as the page writes it."""
CHOSEN = "Anna|Ben|Clara|David|Emma|Felix|ball|book|cup|hat|kite|lamp|red|blue|green|yellow|" + (
    "in the garden|at school|by the river|in the kitchen"
)
"""Words that the stories choose at random, so that a model may write any of them."""
VARIES = r"\d+:\d\d(:\d\d)?|[\d,]+ tokens/s|\b\d+ (s|min)\b|\d\.\d+ ± \d\.\d+"
"""Times, and accuracies of 40 documents."""


def blocks() -> list[tuple[str, str]]:
    """(language, text) of every fenced block, in order."""
    return re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.M | re.S)


def commands(text: str) -> list[tuple[str, str]]:
    """(command, what the page shows after it) of a console block."""
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", text, re.M)


def assert_printed(shown: str, printed: str) -> None:
    """Every line shown was printed, in this order; only where the page has `…` may others stand between, and parts of a start that
    took long, which depend on the machine."""
    lines = [line for line in map(plain, printed.splitlines()) if line and not line.startswith("start: ")]
    place, anywhere = 0, False
    for line in filter(None, map(plain, shown.splitlines())):
        if line == "…":
            anywhere = True
            continue
        found = [i for i in range(place, len(lines) if anywhere else place + 1) if alike(line, lines[i : i + 1])]
        assert found, f"the page shows {line!r}; printed was:\n{printed}"
        place, anywhere = found[0] + 1, False
    assert anywhere or place == len(lines), f"the page leaves out, without …:\n{lines[place:]}"


def plain(line: str) -> str:
    return " ".join(line.split())


def alike(shown: str, printed: list[str]) -> bool:
    """The same words and whole numbers; numbers with a point within 5 %."""
    if not printed:
        return False
    number = r"\d+\.\d+"
    left, right = re.sub(VARIES, "#", shown), re.sub(VARIES, "#", printed[0])
    pairs = zip(re.findall(number, left), re.findall(number, right), strict=False)
    close = all(math.isclose(float(a), float(b), rel_tol=0.05) for a, b in pairs)
    return close and re.sub(number, "#", left) == re.sub(number, "#", right)


def train(folder: Path, arguments: list[str]) -> tuple[int, str]:
    """A job: `llmtrain ARGUMENTS` as one of the ranks that --nproc asks for."""
    with contextlib.chdir(folder):
        return command(*arguments)


@pytest.mark.ci
def test_the_page_is_what_happens(ranks, tmp_path, monkeypatch, capsys):
    project = Project(tmp_path, shards=tmp_path)  # for its subprocesses; the page brings run.yaml and the shards
    stories = []
    for language, text in blocks():
        if language != "console":
            name = text.partition("\n")[0].removeprefix("# ")
            (tmp_path / name).write_text(text, encoding="utf-8")
            continue
        for line, shown in commands(text):
            program, *arguments = shlex.split(line)
            if program == "python":
                status, printed = project.run(sys.executable, *arguments)
            elif arguments[0] == "train":
                size = 1
                if "--nproc" in arguments:
                    place = arguments.index("--nproc")
                    _, size = arguments.pop(place), int(arguments.pop(place))
                status, printed = ranks(size).run(train, tmp_path, arguments)[0]
            else:
                assert program == "llmtrain"
                with monkeypatch.context() as patch:
                    patch.chdir(tmp_path)
                    status = main(arguments)
                streams = capsys.readouterr()
                printed = streams.err if status else streams.out
            printed = printed.replace(str(tmp_path), HOME)
            refused = "errors" in shown or "lr: 0.01 ->" in shown
            assert status == (2 if refused else 0), f"{line}:\n{printed}"
            if arguments[0] == "generate":
                stories.append(printed)
                shown, printed = (re.sub(CHOSEN, "#", part).partition("says")[0] for part in (shown, printed))
            assert_printed(shown, printed)
    assert len(stories) == 2 and stories[0] == stories[1], "the export says something else than the run"


def test_lines_are_compared_with_what_was_printed():
    printed = "step 1/9  loss 5.75\nstep 5/9  loss 4.10  2,000 tokens/s  0:00:01 left\n\ndone in 4 s\n"
    assert_printed("step 1/9  loss 5.70\n…\ndone in 9 s\n", printed)
    assert_printed("…\nstep 5/9  loss 4.1  1 tokens/s  0:10 left\ndone in 9 s\n", printed)
    for wrong in ("step 1/9  loss 5.70\n", "step 1/9  loss 4.70\n…\n", "step 2/9  loss 5.75\n…\n", "…\ndone\n"):
        with pytest.raises(AssertionError):
            assert_printed(wrong, printed)
