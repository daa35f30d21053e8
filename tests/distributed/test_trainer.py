"""What the host does between two steps: nothing there waits for the GPU. That losses are right: the tests of whole runs."""

from unittest.mock import patch

import torch.distributed as dist
from composer.core import State
from composer.loggers import Logger, LoggerDestination

from llmtrain.schema.config import Config
from llmtrain.train import run
from llmtrain.train.optimizers.adamw import ShardedAdamW
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
