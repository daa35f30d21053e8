"""A run with hybrid sharding that lost a replica: it goes on with the ranks of the other one."""

import json

import pytest

from llmtrain.commands.checks import load_runnable
from llmtrain.errors import UserError
from tests.support.runs import train
from tests.support.tiny import tiny_config, tiny_settings

HYBRID = {
    "train.sharding": {"strategy": "hybrid", "shard_size": 2},
    "train.microbatch_size": 2,
    "train.duration": "8 steps",
    "checkpoint.interval": "4 steps",
}


@pytest.mark.ci
def test_two_replicas_of_two_ranks_go_on_as_one_replica(ranks, shards, tmp_path):
    """The same samples in the same order, and losses but for the order of sums; with no more than a checkpoint's steps repeated."""
    whole = ranks(4).run(train, tiny_config(shards, tmp_path / "whole", HYBRID))[0]
    lost = tiny_config(shards, tmp_path / "lost", HYBRID)
    ranks(4).run(train, lost, 6)
    found = ranks(2).run(train, lost)[0]
    assert (
        list(found.samples) == [5, 6, 7, 8] and {step: whole.samples[step] for step in found.samples} == found.samples
    )
    assert found.losses == pytest.approx(whole.losses, rel=1e-4) and found.validation == pytest.approx(
        whole.validation, rel=1e-4
    )


@pytest.mark.parametrize(
    ("ranks_left", "changes", "sentence"),
    [
        (3, {}, "train.sharding.shard_size *line 1 *2: must divide the number of ranks .3."),
        (
            2,
            {"train.global_batch_size": 6},
            "train.global_batch_size *line 1 *6: must be a multiple of 4 .2 ranks x microbatch_size 2",
        ),
    ],
)
def test_what_does_not_divide_is_refused(shards, tmp_path, ranks_left, changes, sentence):
    file = tmp_path / "run.yaml"
    file.write_text(json.dumps(tiny_settings(shards, tmp_path / "run", HYBRID | changes)))
    with pytest.raises(UserError, match=sentence):
        load_runnable(file, world_size=ranks_left)
