"""What the host does between two steps: nothing there waits for the GPU; how a run ends of which one rank fails. That losses are
right: the tests of whole runs."""

import contextlib
import os
from unittest.mock import patch

import pytest
import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.optimizers.adamw import ShardedAdamW
from llmtrain.train.step import Step
from tests.support.ranks import RankFailed
from tests.support.runs import observed_by
from tests.support.tiny import tiny_config


class Events(LoggerDestination):
    """The order of what happens to one rank: optimizer steps, ends of forward passes, and messages by the group of the devices."""

    def __init__(self):
        self.seen: list[str] = []

    def after_forward(self, state: State, logger: Logger) -> None:
        self.seen.append("forward")


def order(config: Config) -> list[str]:
    """A job."""
    events, all_reduce, step = Events(), dist.all_reduce, ShardedAdamW.step

    def observed_all_reduce(tensor, *args, group=None, **kwargs):
        if group is None or group is dist.group.WORLD:
            events.seen.append("message")
        return all_reduce(tensor, *args, group=group, **kwargs)

    def observed_step(self, closure=None):
        found = step(self, closure)  # of which forward and backward passes are a part
        events.seen.append("updated")
        return found

    with (
        observed_by(events),
        patch.object(dist, "all_reduce", observed_all_reduce),
        patch.object(ShardedAdamW, "step", observed_step),
    ):
        run.train(config)
    return events.seen


def test_from_an_update_to_the_next_forward_pass_ranks_exchange_nothing_through_their_devices(ranks, shards, tmp_path):
    config = tiny_config(shards, tmp_path, {"train.duration": "5 steps"})
    for seen in ranks(2).run(order, config):
        updates = [i for i, event in enumerate(seen) if event == "updated"]
        assert len(updates) == 5
        assert [seen[i + 1] for i in updates[:-1]] == ["forward"] * 4
        assert "message" in seen[: updates[0]]


def fail_on_one_rank(config: Config) -> None:
    """A job: the second rank fails in its first step, and ends as one of `llmtrain train` does."""
    last = dist.get_rank() == 1
    with patch.object(Step, "forward_backward", side_effect=ZeroDivisionError) if last else contextlib.nullcontext():
        try:
            run.train(config)
        except ZeroDivisionError:
            os._exit(1)


@pytest.mark.parametrize("stages", [1, 2])
def test_a_rank_that_fails_ends_without_those_that_wait_for_it(ranks, shards, tmp_path, stages):
    """In a collective, or for activations."""
    changes = {"train.duration": "5 steps", "train.microbatch_size": 2, "train.parallel.pipeline": stages}
    with pytest.raises(RankFailed) as failed:
        ranks(2).run(fail_on_one_rank, tiny_config(shards, tmp_path, changes), timeout=60)
    assert "rank 1 died" in str(failed.value) and "hung" not in str(failed.value)
