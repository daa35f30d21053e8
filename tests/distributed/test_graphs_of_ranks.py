"""Runs whose microbatches are launched as by CUDA graphs, by ranks of a CPU: weights are exchanged before them and gradients after
them, around validation, checkpoints and the optimizer. The graphs themselves: tests/gpu/test_cuda_graphs.py."""

import contextlib
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard._fsdp_param import ShardedState

from llmtrain.objectives.base import Batch, Objective, compute_loss
from llmtrain.plan import graph_gain
from llmtrain.schema.config import Config
from llmtrain.train import build, run
from llmtrain.train.graphs import cuda_graphs
from llmtrain.train.graphs import persistent_weights as held_weights
from llmtrain.train.graphs.cuda_graphs import MicrobatchGraph, NoGraph, added_to
from llmtrain.train.graphs.persistent_weights import PersistentUnshardedWeights
from llmtrain.train.microbatch import choose_microbatch
from llmtrain.train.resolved import read_resolved
from tests.support.gauge import Gauge
from tests.support.tiny import tiny_config

COMPARED = ("loss/train/total", "gradient_norm", "cross_entropy")
"""Ends of the names of metrics."""


class WithoutGraphs(MicrobatchGraph):
    """The passes that graphs would replay, by the same weights, to the same sums."""

    made = 0
    most = 8
    """Sequences of a microbatch for which rank 1 can make them."""

    def __init__(self, model: Any, objective: Objective, batch: Batch):
        self.model, self.objective = model, objective
        self.batch = {name: batch[name].clone() for name in self._read(batch)}
        self._backward_of = self._forwards = self.nbytes = 0
        self._within_step = False
        self.weights = PersistentUnshardedWeights(model)
        with self.weights.read():
            self.sums = self.weights.zeros()
        if dist.get_rank() == 1 and len(self.batch["input_ids"]) > WithoutGraphs.most:
            raise NoGraph("no memory would be left")
        WithoutGraphs.made += 1
        self.reached = list(range(len(self.sums)))
        self.anchor, self.d_loss = torch.zeros((), requires_grad=True), torch.ones(())
        self.forward_graph: Any = SimpleNamespace(replay=self.passes)
        self.backward_graph: Any = SimpleNamespace(replay=self.add)

    def passes(self) -> None:
        self.gradients = [torch.zeros_like(total) for total in self.sums]
        with torch.enable_grad(), self.reading(), added_to(self.gradients, self.weights.leaves):
            output = compute_loss(self.model, self.objective, self.batch)
            output.loss.backward()
        self.output = output.each(torch.detach)

    def add(self) -> None:
        for total, gradient in zip(self.sums, self.gradients, strict=True):
            total.add_(gradient * self.d_loss)

    @contextlib.contextmanager
    def reading(self) -> Iterator[None]:
        """Have the layers read the leaves again, which graphs have in their kernels' arguments."""
        groups = {id(group): group for module in self.weights._sharded if (group := held_weights.group_of(module))}
        for parameter, leaf in zip(self.weights._shared, self.weights.leaves, strict=True):
            parameter._unsharded_param, parameter.sharded_state = leaf, ShardedState.UNSHARDED
            parameter._setattr_on_modules(leaf)
        for group in groups.values():
            group._sharded_state = ShardedState.UNSHARDED
        for module in self.weights._sharded:
            module.set_reshard_after_backward(False, recurse=False)
        yield
        for group in groups.values():
            held_weights._forget_gathered(group)
        for module in self.weights._sharded:
            module.set_reshard_after_backward(True, recurse=False)


def trained(config: Config, graphs: bool, most: int = 8) -> tuple[int, list[tuple[int, str, float]]]:
    """A job: how many graphs there were, and what was logged. most: see WithoutGraphs."""
    WithoutGraphs.made, WithoutGraphs.most = 0, most
    none = patch.object(graph_gain, "refusal", lambda *args: None)
    with patch.object(cuda_graphs, "MicrobatchGraph", WithoutGraphs), none if graphs else contextlib.nullcontext():
        run.train(config)
    rows = [json.loads(line) for line in (Path(config.run_dir) / "metrics.jsonl").read_text().splitlines()]
    values = [(row["step"], name, row[name]) for row in rows for name in row if name.endswith(COMPARED)]
    return WithoutGraphs.made, values


@pytest.mark.ci
@pytest.mark.parametrize(
    ("count", "microbatch"),
    [(1, 2), (2, 1), (3, 2)],
)
def test_losses_and_validation_are_those_of_a_run_without(ranks, shards, tmp_path, count, microbatch):
    changes = {
        "train.duration": "9 steps",
        "train.global_batch_size": 12,
        "train.microbatch_size": microbatch,
        "train.sharding": {"strategy": "grad_op", "sync_every_microbatch": False},
        "train.precision": "fp32",
        "eval.interval": "3 steps",
        "checkpoint.interval": "4 steps",
    }
    graphed = tiny_config(shards, tmp_path / "graphed", changes | {"train.cuda_graphs": "on"})
    plain = tiny_config(shards, tmp_path / "plain", changes | {"train.cuda_graphs": "off"})
    made, found = ranks(count).run(trained, graphed, True)[0]
    none, expected = ranks(count).run(trained, plain, False)[0]
    assert (made, none) == (1, 0)
    assert len({value for _, name, value in expected if name.endswith("cross_entropy") and "train" not in name}) == 3
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for mine, other in zip(found, expected, strict=True):
        assert mine[2] == pytest.approx(other[2], rel=2e-5), (mine, other)


@pytest.mark.parametrize(("setting", "size", "made"), [("on", 1, 2), ("auto", 2, 0)])
def test_the_search_for_a_microbatch_makes_the_graphs_of_the_run(ranks, shards, tmp_path, setting, size, made):
    """Of two sequences rank 1 can make none: a run that asks for graphs has microbatches of one, another goes on without."""
    config = tiny_config(
        shards,
        tmp_path,
        {
            "train.duration": "4 steps",
            "train.global_batch_size": 4,
            "train.microbatch_size": "auto",
            "train.sharding": {"strategy": "grad_op", "sync_every_microbatch": False},
            "train.cuda_graphs": setting,
        },
    )
    _, [found, _] = ranks(2).run(searched, config)
    assert found == made  # by rank 1: for the search and for the run
    assert read_resolved(tmp_path)["microbatch_size"] == size


def searched(config: Config) -> tuple[int, Any]:
    """A job: `trained`, with a search as on a GPU."""
    gains = patch.object(graph_gain, "gained_by_run", lambda *args: 1.0)
    gauged = patch.object(build, "choose_microbatch", partial(choose_microbatch, gauge=Gauge()))
    with gains, gauged:
        return trained(config, True, most=1)
