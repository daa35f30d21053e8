"""The watchdog of steps, with a clock of the test's own, and ranks that only write where they are."""

import json
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.distributed.world import World
from llmtrain.train.faults import watchdog as watchdog_module
from llmtrain.train.faults.watchdog import Watchdog, place


@pytest.mark.parametrize(("last", "reported"), [(600.0, True), (2.0, False)])
def test_a_step_that_hangs_is_reported_with_every_ranks_place(tmp_path: Path, monkeypatch, last, reported):
    now, said = [0.0], list[str]()
    monkeypatch.setattr(watchdog_module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(watchdog_module.log, "warning", said.append)
    other = tmp_path / "errors" / "hang-rank1.txt"
    other.parent.mkdir()
    other.write_text(json.dumps({"step": 6, "where": "in the collective all_reduce, from step (step.py:1)"}))
    watchdog = Watchdog(tmp_path, World(0, 3, 0, 3), least=0.2)
    logger: Any = None

    def step(number: int, seconds: float, deadline: float = 0.0) -> None:
        state: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=number)))
        if not number:
            watchdog.fit_start(state, logger)
        watchdog.before_dataloader(state, logger)
        now[0] += seconds
        while not said and time.monotonic() < deadline:
            time.sleep(0.01)
        watchdog.batch_end(state, logger)

    for number in range(5):
        step(number, 1.0 if number else 300.0)  # the first compiles
    step(5, last, time.monotonic() + (100 if reported else 0.3))
    watchdog.close(None, logger)  # type: ignore[arg-type]
    if not reported:
        assert not said and not (tmp_path / "errors" / "hang-rank0.txt").exists()
        return
    [text] = said
    assert text.startswith("WARNING: step 6 has taken 600 s, and a usual one takes 1 s")
    assert "rank 0 in step (test_watchdog.py:" in text and "rank 1 in the collective all_reduce, from step" in text
    assert "rank 2 silent: the process does not run" in text
    assert "in step\n" in (tmp_path / "errors" / "hang-rank0.txt").read_text()


def test_a_rank_that_waits_for_others_is_in_a_collective(tmp_path: Path):
    """A frame of a file of torch.distributed, in place of a collective that never ends."""
    source = compile("def all_reduce(done):\n    done.wait()\n", "/x/torch/distributed/distributed_c10d.py", "exec")
    functions: dict[str, Any] = {}
    exec(source, functions)
    done = threading.Event()
    thread = threading.Thread(target=functions["all_reduce"], args=(done,))
    thread.start()
    found = ""
    while not found.startswith("in the collective all_reduce, from ") and thread.is_alive():  # it has yet to begin
        found = place(sys._current_frames()[thread.ident])  # type: ignore[index]
    done.set()
    thread.join()
    assert found.startswith("in the collective all_reduce, from ")
