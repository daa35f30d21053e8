"""Restarts in place, without ranks; and of two ranks that are plain programs."""

import json
import re
import sys
from pathlib import Path

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.commands.train import run_with_restarts
from llmtrain.distributed.launch import launch
from llmtrain.errors import UserError
from tests.support.tiny import tiny_settings

DIES_TWICE = """
import os, signal, time
attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt < 2 and rank == 1:
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(30 if attempt < 2 else 0)
"""


def restarted(
    statuses: list[int],
    most: int,
    gpus: list[int] | None = None,
    batch: int = 8,
    saved: bool = True,
    gone: str | None = None,
) -> tuple[int, list[int]]:
    """The exit status, and the ranks of each start."""
    starts: list[int] = []

    def start(ranks: int, attempt: int) -> int:
        assert attempt == len(starts)
        starts.append(ranks)
        return statuses[attempt]

    places = iter(gpus or [])

    def check(ranks: int) -> None:
        if gone:
            raise UserError(gone)
        if batch % ranks:
            raise UserError(f"{batch} is no multiple of {ranks}")

    status = run_with_restarts(start, 4, most, check, (lambda: next(places)) if gpus else None, lambda: saved)
    return status, starts


@pytest.mark.parametrize("status", [0, 2, 129, 130, 138, 143])
def test_success_wrong_input_and_signals_are_final(status):
    assert restarted([status], 3) == (status, [4])


def test_a_failure_starts_again_so_many_times(capsys):
    assert restarted([137, 1, 0], 3) == (0, [4, 4, 4])
    assert restarted([137, 1, 137], 2) == (137, [4, 4, 4])
    said = capsys.readouterr().err
    assert "status 137: the ranks start again, from the newest checkpoint (1 of 2)" in said
    assert said.endswith("status 137: no restart of 2 is left\n")
    assert restarted([137], 0) == (137, [4]) and capsys.readouterr().err == ""
    restarted([1, 0], 1, saved=False)
    assert "start again, from the beginning, as no checkpoint was saved (1 of 1)" in capsys.readouterr().err


def test_fewer_gpus_have_as_many_ranks_as_divide_the_batch(capsys):
    assert restarted([1, 1, 0], 3, gpus=[3, 1]) == (0, [4, 2, 1])
    assert "start again, 2 instead of 4, from the newest" in capsys.readouterr().err
    assert restarted([1], 3, gpus=[0]) == (1, [4])
    assert "no restart: no GPU of 4 is left\n" in capsys.readouterr().err


def test_a_yaml_that_was_changed_meanwhile_is_named_where_no_rank_can_run_it(capsys):
    assert restarted([1], 3, batch=4, gone="run.yaml: no such file") == (1, [4])
    assert "no restart: no number of ranks up to 4 can run it:\nrun.yaml: no such file\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("changes", "places", "ranks", "reason"),
    [
        ({}, 3, 2, ""),  # the replica that is left whole
        (
            {"train.sharding.shard_size": 4},
            3,
            0,
            "train.sharding.shard_size *line 1 *4: must divide the number of ranks \\(3\\)",
        ),
        ({"train.global_batch_size": 4, "train.microbatch_size": 2}, 3, 2, ""),
        ({"train.global_batch_size": 3, "train.microbatch_size": 3}, 1, 0, "shard_size"),
    ],
)
def test_hybrid_sharding_loses_whole_replicas(shards, tmp_path, capsys, changes, places, ranks, reason):
    """The launcher's own checks of the YAML, with sharding in groups of two of four ranks."""
    hybrid = {"train.sharding": {"strategy": "hybrid", "shard_size": 2}, "train.microbatch_size": 1}
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tiny_settings(shards, tmp_path / "run", hybrid | changes)))
    starts: list[int] = []

    def start(number: int, attempt: int) -> int:
        starts.append(number)
        return 137 if attempt == 0 else 0

    status = run_with_restarts(start, 4, 1, lambda number: load_runnable(file, world_size=number), lambda: places)
    assert (status, starts) == ((0, [4, ranks]) if ranks else (137, [4]))
    assert re.search(reason, capsys.readouterr().err)


def test_ranks_that_were_killed_start_again_and_the_run_succeeds(tmp_path: Path):
    command = [sys.executable, "-c", DIES_TWICE]
    starts = []

    def start(ranks: int, attempt: int) -> int:
        starts.append(attempt)
        return launch(command, ranks, str(tmp_path), attempt=attempt)

    assert run_with_restarts(start, 2, 3, lambda ranks: None) == 0
    assert starts == [0, 1, 2]
