"""optimizer.offload: the same training, bit by bit, and the same checkpoints, whatever the optimizer and the number of ranks."""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from composer.devices import Device

from llmtrain.schema.config import Config
from tests.support.runs import read_tensors, train
from tests.support.sharded import assert_same, state_after
from tests.support.tiny import tiny_config

KINDS = ("adamw", "muon", "adamw_8bit")


@pytest.fixture(scope="module", params=KINDS)
def configs(request, shards, tmp_path_factory) -> tuple[Config, Config]:
    """Without and with offload."""
    changes = {"optimizer.type": request.param, "optimizer.groups": [{"match": "*.A_log", "lr_factor": 2.0}]}
    folder = tmp_path_factory.mktemp("run")
    here, there = (tiny_config(shards, folder, changes | {"optimizer.offload": offload}) for offload in (False, True))
    return here, there


@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.ci), 2, pytest.param(3, marks=pytest.mark.ci)])
def test_steps_and_checkpoints_are_the_same(ranks, configs, tmp_path, size):
    here, there = configs
    expected = ranks(size).run(state_after, here, None, tmp_path / "here", 2)
    for found, one in zip(ranks(size).run(state_after, there, None, tmp_path / "there", 2), expected, strict=True):
        assert_same(found, one)
    saved, same = (tmp_path / name / "step-00000002" for name in ("here", "there"))
    assert_same(read_tensors(same), read_tensors(saved))
    other = 3 - size if size < 3 else 2  # ranks that go on
    expected = ranks(other).run(state_after, here, saved, None, 2)
    for found, one in zip(ranks(other).run(state_after, there, same, None, 2), expected, strict=True):
        assert_same(found, one)


def brought_to_the_device(config: Config) -> int:
    """A job: tensors of the optimizer's state that Composer brings to the device when a run begins."""
    brought = []
    with patch.object(Device, "optimizer_to_device", lambda self, it: brought.extend(it.state.values()) or it):
        train(config)
    return len(brought)


def test_the_state_of_a_resumed_run_stays_on_the_host(ranks, shards, tmp_path):
    changes = {"train.duration": "5 steps", "optimizer.offload": True}
    ranks(1).run(train, tiny_config(shards, tmp_path, changes), 4)
    assert ranks(1).run(brought_to_the_device, tiny_config(shards, tmp_path, changes)) == [0]
    plain = tiny_config(shards, tmp_path, {**changes, "optimizer.offload": False, "train.duration": "6 steps"})
    assert ranks(1).run(brought_to_the_device, plain) != [0]


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.ci) for kind in KINDS[1:])])
def test_a_run_may_take_its_state_to_the_host_and_back(ranks, shards, tmp_path, kind):
    """Clipped, with skipped steps and a moving average, and saved in the background."""
    changes: dict[str, Any] = {
        "train.duration": "9 steps",
        "eval.interval": "9 steps",
        "checkpoint.interval": "3 steps",
        "train.clip_grad_norm": 0.5,
        "train.spike": {"window": 4, "deviations": 0.05},
        "train.ema": {"decay": 0.8},
        "optimizer.type": kind,
    }
    whole = tiny_config(shards, tmp_path / "whole", changes)
    ranks(1).run(train, whole)
    parts = tiny_config(shards, tmp_path / "parts", changes | {"optimizer.offload": True})
    ranks(1).run(train, parts, 4)
    ranks(1).run(train, tiny_config(shards, tmp_path / "parts", changes), 7)
    ranks(1).run(train, parts)
    last = "checkpoints/step-00000009"
    assert_same(read_tensors(tmp_path / "parts" / last), read_tensors(tmp_path / "whole" / last))


def test_what_is_loaded_is_copied_into_host_memory():
    """Where the values are others than those that wait there: PyTorch's own state of another optimizer."""
    from llmtrain.train.optimizers.host_state import keep_on_host

    def made() -> torch.optim.Optimizer:
        return torch.optim.AdamW([torch.nn.Parameter(torch.ones(3, 4)), torch.nn.Parameter(torch.ones(5))], lr=0.1)

    def step(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.full_like(parameter, 0.5)
        optimizer.step()
        return [parameter.detach().clone() for group in optimizer.param_groups for parameter in group["params"]]

    first, second, third = made(), made(), made()
    for optimizer in (second, third):
        keep_on_host(optimizer, at_once=1)
    expected = [step(first), step(first)][-1]
    step(second)
    kept = second.state[second.param_groups[0]["params"][0]]["exp_avg"]
    third.load_state_dict(second.state_dict())
    assert third.state[third.param_groups[0]["params"][0]]["exp_avg"].data_ptr() != kept.data_ptr()
    second.load_state_dict(second.state_dict())
    assert second.state[second.param_groups[0]["params"][0]]["exp_avg"].data_ptr() == kept.data_ptr()
    for found, value in zip(step(second), expected, strict=True):
        assert torch.equal(found, value)
