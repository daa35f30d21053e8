"""The watchdog of steps, with short times in place of minutes, and ranks that only write where they are."""

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.distributed.world import World
from llmtrain.train.faults.watchdog import Watchdog, place


def step(watchdog: Watchdog, number: int, seconds: float) -> None:
    state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=number)))
    logger: Any = None
    if not number:
        watchdog.fit_start(state, logger)
    watchdog.before_dataloader(state, logger)
    time.sleep(seconds)
    watchdog.batch_end(state, logger)


@pytest.mark.parametrize(("last", "reported"), [(1.0, True), (0.02, False)])
def test_a_step_that_hangs_is_reported_with_every_ranks_place(tmp_path: Path, capsys, monkeypatch, last, reported):
    monkeypatch.delenv("RANK", raising=False)
    other = tmp_path / "errors" / "hang-rank1.txt"
    other.parent.mkdir()
    other.write_text(json.dumps({"step": 6, "where": "in the collective all_reduce, from step (step.py:1)"}))
    watchdog = Watchdog(tmp_path, World(0, 3, 0, 3), least=0.2)
    for number in range(5):
        step(watchdog, number, 0.01 if number else 0.5)  # the first compiles
    step(watchdog, 5, last)
    watchdog.close(None, None)  # type: ignore[arg-type]
    text = capsys.readouterr().err
    if not reported:
        assert text == "" and not (tmp_path / "errors" / "hang-rank0.txt").exists()
        return
    assert text.count("WARNING: step 6 has taken ") == 1
    assert "rank 0 in step (test_watchdog.py:" in text and "rank 1 in the collective all_reduce, from step" in text
    assert "rank 2 silent: the process does not run" in text
    assert "time.sleep(seconds)" in (tmp_path / "errors" / "hang-rank0.txt").read_text()


def test_a_rank_that_waits_for_others_is_in_a_collective(tmp_path: Path):
    """A frame of a file of torch.distributed, in place of a collective that never ends."""
    source = compile("def all_reduce(done):\n    done.wait()\n", "/x/torch/distributed/distributed_c10d.py", "exec")
    functions: dict[str, Any] = {}
    exec(source, functions)
    done = threading.Event()
    thread = threading.Thread(target=functions["all_reduce"], args=(done,))
    thread.start()
    time.sleep(0.1)
    found = place(sys._current_frames()[thread.ident])  # type: ignore[index]
    done.set()
    thread.join()
    assert found.startswith("in the collective all_reduce, from ")
