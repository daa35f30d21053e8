"""Commands with mistyped arguments: each is refused in words and writes nothing, or does what it does.

`pytest -m campaign tests/campaigns`; LLMTRAIN_CAMPAIGN: number of mutants; LLMTRAIN_TEST_SEED: others.
"""

import argparse
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.cli import parser
from tests.campaigns.expected import outcome
from tests.campaigns.findings import Findings
from tests.campaigns.scene import READERS, command

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "40"))
COUNT = int(os.environ.get("LLMTRAIN_CAMPAIGN", "500"))
COMMANDS = {
    **{name: reader.argv for name, reader in READERS.items()},
    "mfu": ["mfu", "--params", "7e9", "--batch", "8", "--seq-len", "64", "--step-time", "1", "--gpu", "h200"],
    "plot": ["plot", "run", "--out", "out.png"],
    "schema": ["schema"],
    "launchers": ["launchers", "out"],
}
WILD = [
    *[
        "-1",
        "0",
        "1",
        "1.5",
        "1e400",
        "nan",
        "99999999999999999999",
        "-",
        "--",
        "---",
        "-x",
        "",
        " ",
        "a b",
        "a\nb",
        "n" * 300,
    ],
    *[
        "[1",
        "{}",
        "{a: [",
        "a=b=c",
        "=",
        ".",
        "a.b=1",
        "None",
        "true",
        "é",
        "\udcff",
        "\x1b[31m",
        "%s",
        "{0}",
        "*",
        "?",
        "'",
        '"',
    ],
    *[
        "/dev/null",
        "/dev/zero",
        "not/here",
        "data",
        "run",
        "run.yaml",
        "hf",
        "texts",
        "s3://",
        "hf://",
        "http://x",
        "file://",
    ],
]
LEFT_OUT = ("--help", "--overwrite", "--force", "--nproc", "--workers", "--version")
"""Options that end a command, that ask for another's files to be replaced, or for as many processes as they say."""


def options(argv: list[str]) -> list[str]:
    """Options of a command."""
    at = parser()
    for word in argv:
        below = next((one.choices for one in at._actions if isinstance(one, argparse._SubParsersAction)), {})
        at = below.get(word, at)
    return [name for one in at._actions for name in one.option_strings if name not in LEFT_OUT and len(name) > 2]


def misspell(word: str, rng: random.Random) -> str:
    at = rng.randrange(len(word) + 1)
    return rng.choice(
        [word[:at] + "x" + word[at:], word[:at] + word[at + 1 :], word[:at] + word[at : at + 1] * 2 + word[at + 1 :]]
    )


Change = Callable[[list[str], int, random.Random], list[str]]
CHANGES: dict[str, Change] = {
    "misspelt": lambda argv, at, rng: [*argv[:at], misspell(argv[at], rng), *argv[at + 1 :]],
    "other": lambda argv, at, rng: [*argv[:at], rng.choice(WILD), *argv[at + 1 :]],
    "swapped": lambda argv, at, rng: [*argv[: at - 1], argv[at], argv[at - 1], *argv[at + 1 :]] if at else argv[::-1],
    "repeated": lambda argv, at, rng: [*argv[:at], argv[at], *argv[at:]],
    "gone": lambda argv, at, rng: [*argv[:at], *argv[at + 1 :]],
    "empty": lambda argv, at, rng: [*argv[:at], "", *argv[at + 1 :]],
    "option": lambda argv, at, rng: [*argv, rng.choice(options(argv) or ["--x"]), rng.choice(WILD)],
    "option alone": lambda argv, at, rng: [*argv, rng.choice(options(argv) or ["--x"])],
    "override": lambda argv, at, rng: [*argv, f"{misspell(rng.choice(KEYS), rng)}={rng.choice(WILD)}"],
    "value": lambda argv, at, rng: [*argv, f"{rng.choice(KEYS)}={rng.choice(WILD)}"],
}
KEYS = [
    "train.duration",
    "model.d_model",
    "model.blocks",
    "data.train",
    "optimizer.lr",
    "run_dir",
    "checkpoint.remote",
    "out",
]
KEYS += ["tasks", "models", "max_length", "eval.prompt", "seed", "name", "checkpoint.interval", "train", "model.layers"]


def judge(status: int | None, text: str, changed: list[str]) -> str:
    """One of: refused, done; hang, fault, silent, writes."""
    if status is None:
        return "hang"
    if "Traceback (most recent call last)" in text or status not in (0, 1, 2):
        return "fault"
    if not status:
        return "done"
    return "silent" if not text.strip() else "writes" if changed else "refused"


def draw(scene: Path, place: Path, count: int) -> Counter[str]:
    """Try `count` mutants; fails with all that are neither refused nor done."""
    rng = random.Random(SEED)
    found = Findings("refused", "done")
    before = outcome(scene)
    shutil.copytree(scene, place)
    for number in range(count):
        argv = list(COMMANDS[list(COMMANDS)[number % len(COMMANDS)]])
        kind = rng.choice(list(CHANGES))
        mutant = CHANGES[kind](argv, rng.randrange(len(argv)), rng)
        status, text = command(place, mutant)
        after = outcome(place)
        differing = {name for name, _ in before.items() ^ after.items()}
        # An empty file that was locked stays: another process may wait for it by now.
        changed = sorted(name for name in differing if not name.endswith(".lock"))
        verdict = judge(status, text, changed)
        found.add(verdict, f"{kind}: {mutant}: {status} {changed[:5]}\n{text[-1500:]}")
        if changed or status is None:
            shutil.rmtree(place)
            shutil.copytree(scene, place)
    return found.passed()


@pytest.mark.ci
def test_a_few_mistyped_commands_are_refused_or_done(scene, tmp_path):
    draw(scene, tmp_path / "copy", 20)


@pytest.mark.campaign
def test_mistyped_commands_are_refused_or_done(scene, tmp_path):
    found = draw(scene, tmp_path / "copy", COUNT)
    assert found["refused"] > COUNT // 3, "the mutants are no mistakes"
