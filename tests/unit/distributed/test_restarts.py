"""Restarts in place, without ranks; and of two ranks that are plain programs."""

import sys
from pathlib import Path

import pytest

from llmtrain.distributed.launch import launch
from llmtrain.distributed.restarts import run_with_restarts

DIES_TWICE = """
import os, signal, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30 if attempt < 2 else 0)
"""


def restarted(statuses: list[int], most: int, gpus: list[int] | None = None, batch: int = 8) -> tuple[int, list[int]]:
    """The exit status, and the ranks of each start."""
    starts: list[int] = []

    def start(ranks: int, attempt: int) -> int:
        assert attempt == len(starts)
        starts.append(ranks)
        return statuses[attempt]

    places = iter(gpus or [])
    status = run_with_restarts(
        start, 4, most, lambda ranks: batch % ranks == 0, (lambda: next(places)) if gpus else None
    )
    return status, starts


@pytest.mark.parametrize("status", [0, 2, 130, 143])
def test_success_wrong_input_and_signals_are_final(status):
    assert restarted([status], 3) == (status, [4])


def test_a_failure_starts_again_so_many_times(capsys):
    assert restarted([137, 1, 0], 3) == (0, [4, 4, 4])
    assert restarted([137, 1, 137], 2) == (137, [4, 4, 4])
    assert "status 137: the ranks start again, from the newest checkpoint (1 of 2)" in capsys.readouterr().err


def test_fewer_gpus_have_as_many_ranks_as_divide_the_batch(capsys):
    assert restarted([1, 1, 0], 3, gpus=[3, 1]) == (0, [4, 2, 1])
    assert "start again, 2 instead of 4, from the newest" in capsys.readouterr().err
    assert restarted([1], 3, gpus=[0]) == (1, [4])
    assert "no restart: 0 of 4 GPUs are left" in capsys.readouterr().err


def test_ranks_that_were_killed_start_again_and_the_run_succeeds(tmp_path: Path):
    command = [sys.executable, "-c", DIES_TWICE]
    starts = []

    def start(ranks: int, attempt: int) -> int:
        starts.append(attempt)
        return launch(command, ranks, str(tmp_path), attempt=attempt)

    assert run_with_restarts(start, 2, 3, lambda ranks: True) == 0
    assert starts == [0, 1, 2]
