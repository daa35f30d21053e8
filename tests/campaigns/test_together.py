"""Runs that begin in the same second on one machine: each ends as it does alone, and nothing of them stays.

`pytest -m campaign tests/campaigns/test_together.py`; LLMTRAIN_CAMPAIGN: rounds; LLMTRAIN_TEST_SEED: others.
"""

import json
import os
import random
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.campaigns.findings import Findings
from tests.campaigns.scene import command
from tests.support.tiny import tiny_settings

SEED = int(os.environ.get("LLMTRAIN_TEST_SEED", "40"))
COUNT = int(os.environ.get("LLMTRAIN_CAMPAIGN", "130"))
EIGHT = 4
"""Every so manieth round is of eight runs of one rank, the others are pairs, every third of them of runs of two ranks."""


def losses(place: Path) -> list[float]:
    """The training losses that a run has logged."""
    file = place / "run/metrics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [row["loss/train/total"] for row in rows if "loss/train/total" in row]


def start(shards: Path, place: Path, ranks: int, kill_after: float | None = None) -> tuple[int | None, str]:
    """Run four steps in `place`; (exit status, what was printed). kill_after: seconds to SIGKILL."""
    place.mkdir(parents=True)
    settings = tiny_settings(shards, Path("run"), {"train.duration": "4 steps", "data.num_workers": 1})
    (place / "run.yaml").write_text(json.dumps(settings))
    argv = ["train", "run.yaml"] + ["--nproc", str(ranks)] * (ranks > 1)
    return command(place, argv, stop=None if kill_after is None else (kill_after, signal.SIGKILL))


def draw(shards: Path, root: Path, count: int) -> None:
    """`count` rounds; fails with each run that ended otherwise than alone. In three of ten rounds one of the runs is
    killed; some runs have temporary folders of their own, as those of several users do."""
    rng = random.Random(SEED)
    alone = {}
    for ranks in (1, 2):
        status, text = start(shards, root / f"alone{ranks}" / "run", ranks)
        assert status == 0, text
        alone[ranks] = losses(root / f"alone{ranks}" / "run")
        assert len(alone[ranks]) == 4
    found = Findings("as alone", "killed")
    shared = set(os.listdir("/dev/shm"))
    for number in range(count):
        size, ranks = (8, 1) if number % EIGHT == EIGHT - 1 else (2, 2 if number % 3 == 0 else 1)
        killed = rng.randrange(size) if rng.random() < 0.3 else None
        users = [i if rng.random() < 0.5 else 0 for i in range(size)]
        places = [root / f"{number}" / f"user{user}" / f"{i}" for i, user in enumerate(users)]
        stops = [rng.uniform(0.2, 4.0) if i == killed else None for i in range(size)]
        with ThreadPoolExecutor(size) as pool:
            ended = list(pool.map(start, [shards] * size, places, [ranks] * size, stops))
        for i, (place, (status, text)) in enumerate(zip(places, ended, strict=True)):
            fine = status == 0 and losses(place) == alone[ranks]
            verdict = "as alone" if fine else "killed" if i == killed and status == -signal.SIGKILL else "other"
            found.add(verdict, f"round {number}, run {i} of {size}: {status}, {losses(place)}\n{text[-2000:]}")
    left = set(os.listdir("/dev/shm")) - shared
    assert not left, f"in /dev/shm: {sorted(left)}"
    found.passed()


@pytest.mark.campaign
def test_runs_that_begin_together_end_as_alone(shards, tmp_path):
    draw(shards, tmp_path, COUNT)
