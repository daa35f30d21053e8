"""Ranks that hold stages of a model (train.parallel.pipeline) compute what one rank does."""

import pytest

from tests.distributed.test_context_parallel import ATTENTION, DELTA, MAMBA, SHARED, SHORT
from tests.support.runs import train
from tests.support.tiny import tiny_config

FOUR = SHORT | {"train.microbatch_size": 1}

def test_run(ranks, shards, tmp_path):
    whole = ranks(1).run(train, tiny_config(shards, tmp_path / "whole", FOUR))[0]
    run = ranks(2).run(train, tiny_config(shards, tmp_path / "run", FOUR | {"train.parallel.pipeline": 2}), timeout=60)[0]
    print(whole); print(run)
    assert run.losses == pytest.approx(whole.losses, rel=1e-5)
