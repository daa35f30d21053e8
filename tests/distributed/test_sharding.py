"""Settings of sharding that a run chooses or is given: the same training, but for how sums are rounded."""

from __future__ import annotations

import pytest

from tests.support.runs import train
from tests.support.tiny import tiny_config

SHORT = {"train.duration": "6 steps", "train.precision": "amp_bf16", "train.microbatch_size": 2}


def test_a_named_sharding_changes_nothing(ranks, shards, tmp_path):
    losses = []
    for i, sharding in enumerate(({}, {"strategy": "grad_op", "sync_every_microbatch": False})):
        config = tiny_config(shards, tmp_path / f"{i}", {**SHORT, "train.sharding": sharding})
        losses.append(list(ranks(2).run(train, config)[0].losses.values()))
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)


def test_gradients_summed_in_bf16_are_rounded(ranks, shards, tmp_path):
    """The first loss is before any gradient; those after it differ a little."""
    losses = []
    for dtype in ("fp32", "bf16"):
        config = tiny_config(shards, tmp_path / dtype, {**SHORT, "train.sharding": {"reduce_dtype": dtype}})
        losses.append(list(ranks(2).run(train, config)[0].losses.values()))
    assert losses[1][0] == losses[0][0]
    assert losses[1][1:] != losses[0][1:]
    assert losses[1] == pytest.approx(losses[0], abs=0.02)
