"""`llmtrain data seen` names what a run was given, resumed at random steps on 1, 2 and 4 ranks while its mixture changes twice."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from llmtrain.cli import main
from tests.support import runs
from tests.support.tiny import GLOBAL_BATCH, SEQ_LEN, tiny_config

STEPS = 500
SIZES = {"web": 3000, "code": 700, "books": 90}


@pytest.fixture(scope="module")
def streams(tmp_path_factory) -> dict[str, dict[str, str]]:
    from streaming import MDSWriter

    root, rng = tmp_path_factory.mktemp("streams"), np.random.default_rng(0)
    for name, size in SIZES.items():
        columns, options = {"tokens": f"ndarray:uint16:{SEQ_LEN}"}, {"hashes": ["xxh64"], "size_limit": 10_000}
        with MDSWriter(out=str(root / name), columns=columns, **options) as out:
            for _ in range(size):
                out.write({"tokens": rng.integers(0, 300, SEQ_LEN).astype(np.uint16)})
    return {name: {"local": str(root / name)} for name in SIZES}


@pytest.mark.slow
def test_every_step_of_a_run_that_was_resumed_on_other_ranks_is_named(ranks, streams, tmp_path, capsys):
    third = STEPS // 3
    tenth, eighth = (third * GLOBAL_BATCH * SEQ_LEN // part for part in (10, 8))
    phases: list[dict[str, Any]] = [
        {"tokens": {"web": 8 * tenth, "code": tenth, "books": tenth}},
        {"tokens": {"web": 3 * eighth, "code": 5 * eighth, "books": 0}},
        {"proportions": {"web": 1, "code": 1, "books": 1}},
    ]
    changes = {
        "data.train": {"streams": streams},
        "data.validation": None,
        "data.mixture": phases,
        "data.num_canonical_nodes": 4,
        "train.duration": f"{STEPS} steps",
        "train.microbatch_size": 2,
        "checkpoint.interval": f"{STEPS // 13} steps",
    }
    run_dir = tmp_path / "run"
    config = tiny_config(Path("unused"), run_dir, changes)
    rng = random.Random(0)
    given: dict[int, list[int]] = {}
    stops = [*sorted(rng.sample(range(20, STEPS), 5)), None]
    for stop, size in zip(stops, (1, 4, 2, 1, 2, 4), strict=True):
        [found, *_] = ranks(size).run(runs.train, config, stop)
        assert all(given.get(step, ids) == ids for step, ids in found.samples.items())
        given |= found.samples
    assert sorted(given) == list(range(1, STEPS + 1))
    assert main(["data", "seen", str(run_dir), "--steps", f"1:{STEPS}", "--json"]) == 0
    named: dict[int, list[int]] = {}
    kinds: dict[int, list[str]] = {}
    for line in capsys.readouterr().out.splitlines():
        sample = json.loads(line)
        named.setdefault(sample["step"], []).append(sample["sample"])
        kinds.setdefault(sample["step"], []).append(sample["stream"])
    assert {step: sorted(ids) for step, ids in named.items()} == given
    middle = [name for step in range(third + 1, 2 * third + 1) for name in kinds[step]]
    assert "books" not in middle and 0.5 < middle.count("code") / len(middle) < 0.75
