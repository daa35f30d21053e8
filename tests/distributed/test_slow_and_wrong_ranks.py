"""Ranks that are late, or compute something else: named, in a run that is otherwise the same."""

import contextlib
import dataclasses
import json
import os
import time
from pathlib import Path
from unittest.mock import patch

import torch
from composer.loggers import LoggerDestination

from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.faults import corruption
from tests.support import runs
from tests.support.tiny import tiny_config

SETTINGS = {"train.duration": "4 steps", "train.microbatch_size": 2, "eval.interval": "100 steps"}


class Late(LoggerDestination):
    """Data of rank 1 that come 0.3 s after rank 0 has begun its step, whatever else the machine does."""

    def __init__(self, folder: Path):
        self.folder = folder

    def before_dataloader(self, state, logger) -> None:
        begun = self.folder / f"step-{state.timestamp.batch.value}"
        if os.environ["RANK"] == "0":
            begun.touch()
            return
        while not begun.exists():
            time.sleep(0.01)
        time.sleep(0.3)


def train(config: Config, fault: str = "") -> tuple[runs.Run | None, str]:
    """A job: (the run, or the error that ended it). fault: of rank 1."""
    checksum = corruption._checksum
    with contextlib.ExitStack() as held:
        if fault == "late":
            held.enter_context(runs.observed_by(Late(Path(config.run_dir).parent)))
        if os.environ["RANK"] == "1" and fault == "wrong":

            def wrong(outputs, batch):
                hidden = outputs.hidden.clone()
                hidden[0, 3, 5] = torch.nextafter(hidden[0, 3, 5], hidden.new_tensor(9.0))
                return checksum(dataclasses.replace(outputs, hidden=hidden), batch)

            held.enter_context(patch.object(corruption, "_checksum", wrong))
        if fault == "late":
            run.train(config)  # what runs.train observes makes the ranks wait before
            return None, ""
        try:
            return runs.train(config), ""
        except corruption.CorruptionError as error:
            return None, str(error)


def test_the_rank_that_comes_last_is_a_metric(ranks, shards, tmp_path):
    ranks(2).run(train, tiny_config(shards, tmp_path / "run", SETTINGS), "late")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    last = [(line["ranks/last"], line["ranks/lag_seconds"]) for line in lines if "ranks/last" in line][1:]
    # On a loaded machine the other may be later once.
    assert len(last) == 3 and sum(rank == 1 and lag > 0.15 for rank, lag in last) >= 2, last


def test_equal_ranks_train_as_without_the_comparison(ranks, shards, tmp_path):
    [(plain, _), _] = ranks(2).run(train, tiny_config(shards, tmp_path / "plain", SETTINGS))
    [(compared, _), _] = ranks(2).run(
        train, tiny_config(shards, tmp_path / "run", SETTINGS | {"train.compare_ranks": 2})
    )
    assert plain is not None and compared is not None and compared.losses == plain.losses


def test_one_bit_ends_the_run_and_names_the_ranks(ranks, shards, tmp_path):
    config = tiny_config(shards, tmp_path / "run", SETTINGS | {"train.compare_ranks": 3})
    errors = [error for _, error in ranks(2).run(train, config, "wrong")]
    assert errors[0] == errors[1]
    assert "before step 3 (train.compare_ranks): rank 0 on " in errors[0] and "; rank 1 on " in errors[0]
