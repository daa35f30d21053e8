"""What the tests of training share: tiny shards, and processes that act as ranks."""

import gc
import os
import random
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from llmtrain.schema.data import PrepareConfig
from tests.support.interpreter import FURTHER
from tests.support.process_state import SIGNALS, restored
from tests.support.ranks import Ranks, share_warm
from tests.support.tiny import GLOBAL_BATCH, SEQ_LEN, STEPS_PER_EPOCH

# Collecting makes a few million objects that all stay: looking for garbage among them again and again takes ten seconds.
gc.disable()

# Before torch is imported: workers and ranks share the cores, and threads beyond those wait for each other by spinning.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Where Python is told to keep no bytecode, each of the many processes of the tests compiles the thousands of files that
# Composer imports, for some ten seconds. So it is kept, but apart.
if sys.dont_write_bytecode:
    sys.dont_write_bytecode, sys.pycache_prefix = False, str(Path(__file__).parents[1] / ".pytest_cache" / "bytecode")
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    os.environ["PYTHONPYCACHEPREFIX"] = sys.pycache_prefix

HANDLERS = pytest.StashKey[dict[signal.Signals, Any]]()
"""Of signals, before tests are collected."""

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards make toxic brew for evil queens".split()  # noqa: SIM905


@pytest.fixture(scope="session")
def shards(tmp_path_factory) -> Path:
    """Prepared text: train/ of 16 batches of 8 samples (and a few more samples), validation/, tokenizer/."""
    from llmtrain.data.prepare import prepare

    folder = tmp_path_factory.mktemp("tiny")
    rng = random.Random(0)
    for i in range(40):
        text = " ".join(rng.choice(WORDS) for _ in range(55))
        (folder / "text").mkdir(exist_ok=True)
        (folder / "text" / f"{i:02}.txt").write_text(text, encoding="utf-8")
    made = prepare(
        PrepareConfig(
            sources=[str(folder / "text")],
            out=str(folder / "shards"),
            vocab_size=300,
            seq_len=SEQ_LEN,
            validation_fraction=0.2,
            workers=1,
        ),
        progress=False,
    )
    assert made.split("train")["samples"] // GLOBAL_BATCH == STEPS_PER_EPOCH, made.split("train")
    return folder / "shards"


@pytest.fixture(scope="module", autouse=True)
def process_of_no_run() -> Iterator[None]:
    """The next file's tests begin as in a process of their own."""
    with restored():
        yield


@pytest.fixture(scope="module")
def ranks() -> Iterator[Callable[[int], Ranks]]:
    """ranks(n): a group of n processes, the same one for all tests of a file until it breaks.

    Not for the whole session: gloo polls in every process group that a run has made, which costs a tenth of a core or more.
    """
    groups: dict[int, Ranks] = {}

    def group(size: int) -> Ranks:
        if size in groups and groups[size].worn:
            groups[size].close()
        if size not in groups or not groups[size].alive:
            groups[size] = Ranks(size)
        return groups[size]

    yield group
    for made in groups.values():
        made.close()


def pytest_addoption(parser) -> None:
    parser.addoption("--ci", action="store_true", help="with the tests marked ci, compile or wheel, as .ci/run does")


def pytest_configure(config) -> None:
    """`--dist loadfile` would begin with the files of many tests. Ours of few are the long ones: in the order of folders,
    they come first, and no worker is left with one at the end."""
    os.environ[FURTHER] = "--ci" * config.getoption("--ci")
    if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # under `nohup`: what tests start would ignore it too
        signal.signal(signal.SIGHUP, lambda *_: None)
    config.stash[HANDLERS] = {number: signal.getsignal(number) for number in SIGNALS}
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        share_warm()
    if hasattr(config.option, "loadscopereorder"):
        config.option.loadscopereorder = False


def pytest_collection_finish(session) -> None:
    # Composer takes signals as it is imported. A process that a test forks would inherit that, and may not end by SIGTERM.
    for number, handler in session.config.stash[HANDLERS].items():
        signal.signal(number, handler)
    gc.collect()
    gc.freeze()  # of what is there now, nothing becomes garbage
    gc.enable()


def pytest_collection_modifyitems(config, items) -> None:
    """Tests marked slow, ci, campaign, compile or wheel run only when asked for, as by pytest -m slow; those marked gpu where
    one is."""
    if of_gpus := [item for item in items if item.get_closest_marker("gpu")]:
        import torch

        for item in [] if torch.cuda.is_available() else of_gpus:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA or ROCm GPU"))
    asked = config.getoption("-m") + " ci compile wheel" * config.getoption("--ci")
    unasked = {mark for mark in ("slow", "ci", "campaign", "compile", "wheel") if mark not in asked}
    left_out = [item for item in items if not unasked.isdisjoint(mark.name for mark in item.iter_markers())]
    config.hook.pytest_deselected(items=left_out)
    gone = set(left_out)
    items[:] = [item for item in items if item not in gone]
