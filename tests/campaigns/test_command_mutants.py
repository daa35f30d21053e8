"""Commands with mistyped arguments: each is refused in words and writes nothing, or does what it does. Half of the campaign's
mutants are of YAMLs (tests/cli/test_check_mutants.py).

`pytest -m campaign tests/campaigns`; LLMTRAIN_CAMPAIGN: number of mutants; LLMTRAIN_TEST_SEED: others.
"""

import argparse
import os
import random
import shutil
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from llmtrain.cli import parser
from tests.campaigns.expected import outcome
from tests.campaigns.findings import Findings
from tests.campaigns.scene import READERS, command
from tests.cli.test_check_mutants import check_mutants

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "40"))
COUNT = int(os.environ.get("LLMTRAIN_CAMPAIGN", "3000"))
COMMANDS = {
    **{name: reader.argv for name, reader in READERS.items()},
    "mfu": ["mfu", "--params", "7e9", "--batch", "8", "--seq-len", "64", "--step-time", "1", "--gpu", "h200"],
    "plot": ["plot", "run", "--out", "out.png"],
    "schema": ["schema"],
    "launchers": ["launchers", "out"],
    "serve": ["serve", "run", "--port", "0", "--rows", "2", "--chat-template", "chat.jinja"],
    "bench serve": ["bench", "serve", "http://127.0.0.1:1/v1", "--requests", "4", "--users", "1", "--out", "out"],
    "bench train": ["bench", "train", "sweep.yaml", "--out", "out"],
    "bench tune": ["bench", "tune", "--operation", "norm", "--shape", "d_model=64", "--dry-run"],
    "bench kernels": ["bench", "kernels", "--only", "norm", "--quick", "--out", "out"],
}
SERVED = 15.0
"""Seconds after which a server is sent SIGTERM."""
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


def verbs_below(at: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    return next((one.choices for one in at._actions if isinstance(one, argparse._SubParsersAction)), {})


def leaves(at: argparse.ArgumentParser) -> list[list[str]]:
    """The words of each command that has no commands below it."""
    return [[word, *rest] for word, below in verbs_below(at).items() for rest in leaves(below) or [[]]]


def options(argv: list[str]) -> list[str]:
    """Options of a command."""
    at = parser()
    for word in argv:
        at = verbs_below(at).get(word, at)
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
        status, text = command(place, mutant, stop=(SERVED, signal.SIGTERM) if "serve" in mutant else None)
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


def test_every_command_has_mutants():
    verbs = {" ".join(argv) for argv in leaves(parser())}
    tried = {verb for verb in verbs for argv in COMMANDS.values() if argv[: verb.count(" ") + 1] == verb.split()}
    assert verbs == tried


@pytest.mark.campaign
def test_mistyped_commands_are_refused_or_done(scene, tmp_path):
    found = draw(scene, tmp_path / "copy", COUNT // 2)
    assert found["refused"] > COUNT // 6, "the mutants are no mistakes"


@pytest.mark.campaign
def test_mistyped_yamls_are_refused_or_accepted(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_mutants(COUNT - COUNT // 2, tmp_path, SEED)
