"""train.microbatch_size: auto on ranks that run out of (made-up) memory."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.config import Config
from llmtrain.train import microbatch
from tests.support import runs
from tests.support.gauge import Gauge
from tests.support.tiny import tiny_config


def fail(*_: Any) -> None:
    raise torch.OutOfMemoryError("HIP out of memory. Tried to allocate 2.00 GiB.")


def with_fake_memory(
    config: Config, most: int, poor: int | None = None, in_backward: bool = False
) -> tuple[Any, list[int]]:
    """A job: the run of a config where passes of more than `most` sequences run out of memory, and the sizes that were tried.

    poor: the one rank of which that is true; default: of all. in_backward: amid the backward pass, not before it.
    """
    tried: list[int] = []
    limited_here = poor is None or poor == torch.distributed.get_rank()
    choose, call = microbatch.choose_microbatch, CausalLM.__call__

    def limited(self: CausalLM, input_ids: torch.Tensor, *rest: Any) -> Any:
        if torch.is_grad_enabled():
            tried.append(len(input_ids))
        limits = limited_here and len(input_ids) > most
        hooks = []
        if limits and in_backward:
            layer: Any = self.hybrid.blocks[1]
            hooks = [layer.register_forward_hook(lambda module, args, output: output.register_hook(fail) and None)]
        found = call(self, input_ids, *rest)
        for hook in hooks:
            hook.remove()
        if limits and not in_backward:  # in the middle of things: between the forward and the backward pass
            fail()
        return found

    with (
        patch.object(CausalLM, "__call__", limited),
        patch("llmtrain.train.build.choose_microbatch", lambda *args: choose(*args, gauge=Gauge())),
    ):
        return runs.train(config), tried


@pytest.mark.parametrize("sync", [pytest.param(True, marks=pytest.mark.ci), False])
def test_a_size_is_found_and_remembered_and_training_is_as_with_it(ranks, shards, tmp_path, sync):
    """8 sequences a step over two ranks: 4 do not fit, 2 do."""
    changes = {
        "train.duration": "6 steps",
        "train.sharding": {"sync_every_microbatch": sync},
        "checkpoint.interval": "3 steps",
    }
    [named, _] = ranks(2).run(
        runs.train, tiny_config(shards, tmp_path / "named", {**changes, "train.microbatch_size": 2})
    )
    config = tiny_config(shards, tmp_path / "auto", {**changes, "train.microbatch_size": "auto"})
    [(found, tried), _] = ranks(2).run(with_fake_memory, config, 2)
    assert tried[:4] == [4, 2, 2, 2] and set(tried[4:]) == {2} and len(tried) == 4 + 6 * 2
    assert found.losses == named.losses and found.samples == named.samples
    longer = config.model_copy(
        update={"train": config.train.model_copy(update={"duration": type(config.train.duration)(8, "steps")})}
    )
    [(again, tried), _] = ranks(2).run(with_fake_memory, longer, 2)
    assert tried == [2] * 4 and list(again.losses) == [*range(1, 9)]


@pytest.mark.parametrize(
    ("poor", "in_backward", "sync"),
    [
        (0, False, True),
        (1, True, True),
        pytest.param(1, False, False, marks=pytest.mark.ci),
        pytest.param(0, True, False, marks=pytest.mark.ci),
    ],
)
def test_where_one_rank_alone_runs_out_of_memory_the_others_do_not_wait_for_it(
    ranks, shards, tmp_path, poor, in_backward, sync
):
    """The other rank goes on with its pass, whose next collective this one would never join."""
    config = tiny_config(
        shards,
        tmp_path,
        {
            "train.duration": "5 steps",
            "train.sharding": {"sync_every_microbatch": sync},
            "train.microbatch_size": "auto",
        },
    )
    for found, tried in ranks(2).run(with_fake_memory, config, 2, poor, in_backward):
        assert tried[:4] == [4, 2, 2, 2] and set(tried[4:]) == {2}
        assert list(found.losses) == [*range(1, 6)]
