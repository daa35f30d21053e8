"""Whether tensor-parallel ranks overlap collectives with products. The graphs: tests/distributed/test_async_tensor.py."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor import config as inductor

from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform
from llmtrain.models.tensor_parallel import TensorRanks
from llmtrain.schema.training import TrainConfig
from llmtrain.train.ranks import async_tensor
from llmtrain.train.ranks.async_tensor import overlap_products, refusal

NVIDIA = Platform("nvidia", "sm90", "H200", 140 << 30, 132)
AMD = Platform("amd", "gfx942", "MI300X", 190 << 30, 304)
CPU = Platform("cpu", "cpu", "CPU", 1 << 30)
PAIR = World(3, 4, 3, 4, tensor=2)


def train(setting: str = "auto", **settings: Any) -> TrainConfig:
    given = {"duration": "10 steps", "global_batch_size": 8, "microbatch_size": 4} | settings
    return TrainConfig.model_validate(given | {"parallel": {"tensor": 2, "async_tensor": setting}})


@pytest.fixture
def reachable(monkeypatch):
    """The pairs of GPUs that read each other's memory, of one node: all but what the test takes out."""
    pairs = {(a, b) for a in range(4) for b in range(4)}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in pairs)
    return pairs


@pytest.mark.parametrize(
    ("world", "platform", "config", "reason"),
    [
        (PAIR, NVIDIA, train(), None),
        (PAIR, NVIDIA, train("on"), None),
        (PAIR, CPU, train(), "no GPUs"),
        (PAIR, AMD, train(), "not tried on AMD"),
        (PAIR, AMD, train("on"), None),
        (PAIR, NVIDIA, train(compile="off"), "not compiled"),
        (World(3, 6, 0, 3, tensor=2), NVIDIA, train(), "group of 2 ranks lies on several nodes"),
    ],
)
def test_reasons_against_overlap(reachable, world: World, platform: Platform, config: TrainConfig, reason: str | None):
    found = refusal(config, world, platform)
    assert found is None if reason is None else reason in (found or "")


def test_only_gpus_of_the_own_group_must_reach_each_other(reachable):
    reachable.discard((3, 0))
    assert refusal(train(), PAIR, NVIDIA) is None
    reachable.discard((3, 2))
    assert refusal(train(), PAIR, NVIDIA) == "GPU 3 cannot read the memory of GPU 2"


@pytest.fixture
def said(caplog) -> Iterator[pytest.LogCaptureFixture]:
    """What the run says. The compiler's setting is put back after the test."""
    caplog.set_level("INFO", "llmtrain.run")
    with inductor.patch(_micro_pipeline_tp=False):
        yield caplog


def test_auto_goes_on_without_and_on_does_not(said):
    ranks = TensorRanks(1, 2)
    assert not overlap_products(ranks, train("off"), PAIR, NVIDIA)
    assert not overlap_products(ranks, train(), PAIR, CPU) and not said.messages
    assert not overlap_products(ranks, train(compile="off"), PAIR, NVIDIA)
    assert said.messages == [
        "tensor parallelism: collectives wait for their products (async_tensor: off), as layers are not compiled"
    ]
    with pytest.raises(UserError, match=r"train\.parallel\.async_tensor = on: .* no GPUs .*; use auto or off"):
        overlap_products(ranks, train("on"), PAIR, CPU)
    assert not inductor._micro_pipeline_tp


@pytest.mark.parametrize("reason", [None, "no symmetric memory"])
def test_the_group_is_tried_before_the_compiler_is_reported(said, reachable, monkeypatch, reason: str | None):
    monkeypatch.setattr(async_tensor, "_reason_of_group", lambda ranks: reason)
    overlaps = overlap_products(TensorRanks(1, 2), train(), PAIR, NVIDIA)
    assert overlaps == inductor._micro_pipeline_tp == (reason is None)
    (message,) = said.messages
    assert (reason or "run beside their products") in message
