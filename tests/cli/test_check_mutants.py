"""Mutants of every shipped YAML: whatever is wrong with a file, `llmtrain check` says so, at once and by name.

LLMTRAIN_FUZZ_SEED chooses other mutants. All 10,000 take minutes: `pytest -m slow tests/cli/test_check_mutants.py`.
"""

import os
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llmtrain.commands.check import summary
from llmtrain.commands.checks import load_runnable
from llmtrain.config.report import ConfigError
from llmtrain.errors import UserError
from llmtrain.eval.lm_eval.index import index_of
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.run_config import load_eval_run
from llmtrain.eval.tasks.config import TaskConfig
from llmtrain.eval.tasks.load import read_section
from tests.support.mutants import Mutant, mutant

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("LLMTRAIN_FUZZ_SEED", "19"))
LONGEST = 2.0
"""Seconds of CPU time, without the index of an installed lm-evaluation-harness: 14,000 files, read once by a process."""


def _check_training(path: str, overrides: tuple[str, ...]) -> None:
    summary(load_runnable(path, overrides))


def _check_eval(path: str, overrides: tuple[str, ...]) -> None:
    load_eval_run(path, overrides, needs_models=False)


KINDS: dict[str, tuple[str, Callable[[str, tuple[str, ...]], Any]]] = {
    "training": ("yamls/**/*.yaml", _check_training),
    "eval": ("eval/*.yaml", _check_eval),
    "tasks": ("eval/tasks/*.yaml", lambda path, _: read_section(path, TaskConfig)),
    "gauntlets": ("eval/gauntlets/*.yaml", lambda path, _: load_gauntlet(path)),
}


WHOLE_FILE = re.compile(r"line \d+|is empty|is not text|is not a mapping|is a config for|has more than \d+ characters")


def names_its_place(error: UserError) -> bool:
    """True if the refusal names keys, or the line where the text is no YAML, or says what is wrong with the whole file."""
    if isinstance(error, ConfigError) and all(problem.path for problem in error.problems):
        return True
    return bool(WHOLE_FILE.search(str(error)))


def refuse_or_accept(kind: str, given: Mutant, file: Path) -> bool:
    """Check one mutant; True if it was accepted. Fails with the mutant's text for anything but a clean answer."""
    file.write_text(given.text, encoding="utf-8", errors="surrogatepass")
    start = time.process_time()
    try:
        KINDS[kind][1](str(file), given.overrides)
        accepted = True
    except UserError as error:
        accepted = False
        if not names_its_place(error):
            pytest.fail(f"{kind}: the refusal names no key:\n{error}\n{given}")
    except Exception as error:
        raise AssertionError(f"{kind}: {error!r}\n{given}") from error
    seconds = time.process_time() - start
    assert seconds < LONGEST, f"{kind}: {seconds:.1f} s\n{given}"
    return accepted


def check_mutants(count: int, folder: Path) -> None:
    rng = random.Random(SEED)
    texts = {
        kind: [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]
        for kind, (pattern, _) in KINDS.items()
    }
    everything = [text for group in texts.values() for text in group]
    index_of()
    accepted = 0
    for _ in range(count):
        kind = rng.choices(list(KINDS), weights=[6, 1, 2, 1])[0]
        sources = [rng.choice(texts[kind]), *rng.sample(everything, 2)]
        accepted += refuse_or_accept(kind, mutant(rng, sources), folder / "mutant.yaml")
    assert 0.02 * count < accepted < 0.5 * count, "the mutants are no test of the checks"


@pytest.mark.ci
def test_every_mutant_gets_a_clean_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_mutants(500, tmp_path)


@pytest.mark.slow
def test_ten_thousand_mutants_get_a_clean_answer(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    check_mutants(10_000, tmp_path)
