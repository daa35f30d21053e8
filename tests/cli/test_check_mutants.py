"""Mutants of every kind of YAML that a command reads: each gets an answer at once, and a refusal names its place.

LLMTRAIN_FUZZ_SEED chooses other mutants. All 10,000 take minutes: `pytest -m slow tests/cli/test_check_mutants.py`.
"""

import os
import random
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from llmtrain.bench.train.sweep import load_sweep
from llmtrain.commands.check import summary
from llmtrain.commands.checks import load_runnable
from llmtrain.config.report import ConfigError
from llmtrain.convert.foundry.migrate import migrate
from llmtrain.errors import UserError
from llmtrain.eval.lm_eval.index import index_of
from llmtrain.eval.report.gauntlet import load_gauntlet
from llmtrain.eval.run_config import load_eval_run
from llmtrain.eval.tasks.config import TaskConfig
from llmtrain.eval.tasks.load import read_section
from llmtrain.kernels.tuning_table import load
from tests.support.foundry import FULL
from tests.support.mutants import Mutant, mutant

ROOT = Path(__file__).parents[2]
SEED = int(os.environ.get("LLMTRAIN_FUZZ_SEED", "19"))
LONGEST = 2.0
"""Seconds of CPU time, without the index of an installed lm-evaluation-harness: 14,000 files, read once by a process."""


def _check_training(path: str, overrides: tuple[str, ...]) -> None:
    summary(load_runnable(path, overrides))


def _check_eval(path: str, overrides: tuple[str, ...]) -> None:
    load_eval_run(path, overrides, needs_models=False)


SWEEP = "models: [pretrain/mpt-125m, pretrain/mamba2-130m]\nseq_lens: [512]\nprecisions: [bf16, rowwise]\nsettings: [seed=1]\n"


def _texts(pattern: str) -> list[str]:
    return [path.read_text(encoding="utf-8") for path in sorted(ROOT.glob(pattern))]


@dataclass(frozen=True)
class Kind:
    """Good files of a kind, the reader, and how often it is drawn."""

    texts: list[str]
    read: Callable[[str, tuple[str, ...]], Any]
    weight: int = 1


KINDS = {
    "training": Kind(_texts("yamls/**/*.yaml"), _check_training, 6),
    "eval": Kind(_texts("eval/*.yaml"), _check_eval),
    "tasks": Kind(_texts("eval/tasks/*.yaml"), lambda path, _: read_section(path, TaskConfig), 2),
    "gauntlets": Kind(_texts("eval/gauntlets/*.yaml"), lambda path, _: load_gauntlet(path)),
    "sweeps": Kind([SWEEP], lambda path, _: load_sweep(path)),
    "foundry": Kind([FULL], lambda path, _: migrate(path), 2),
    "tuning": Kind(_texts("llmtrain/kernels/tables/*.yaml"), lambda path, _: load(Path(path), None, own=True)),
}


WHOLE_FILE = re.compile(
    r"line \d+|is empty|is not text|is not a mapping|is a config for|has more than \d+ characters|row \d+|cannot read"
)


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
        KINDS[kind].read(str(file), given.overrides)
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


def check_mutants(count: int, folder: Path, seed: int = SEED) -> None:
    rng = random.Random(seed)
    everything = [text for kind in KINDS.values() for text in kind.texts]
    index_of()
    accepted = 0
    for _ in range(count):
        kind = rng.choices(list(KINDS), weights=[kind.weight for kind in KINDS.values()])[0]
        sources = [rng.choice(KINDS[kind].texts), *rng.sample(everything, 2)]
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
