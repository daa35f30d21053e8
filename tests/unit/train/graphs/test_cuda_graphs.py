"""Whether a run takes CUDA graphs, and what a failed attempt leaves. The graphs themselves: tests/gpu/test_cuda_graphs.py."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from llmtrain.distributed.world import World
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform
from llmtrain.models.context import Context
from llmtrain.models.loss import LossOutput
from llmtrain.objectives.next_token import NextToken
from llmtrain.objectives.sections import NextTokenSection
from llmtrain.plan import graph_gain
from llmtrain.plan.graph_gain import refusal
from llmtrain.schema.training import TrainConfig
from llmtrain.train.graphs import cuda_graphs
from llmtrain.train.graphs.cuda_graphs import GraphedLoss, MicrobatchGraph, NoGraph, graphed_loss
from llmtrain.train.graphs.persistent_weights import PersistentUnshardedWeights

NVIDIA = Platform("nvidia", "sm90", "H200", 140 << 30, 132)
AMD = Platform("amd", "gfx942", "MI300X", 190 << 30, 304)
CPU = Platform("cpu", "cpu", "CPU", 1 << 30)


ONCE = {"strategy": "grad_op", "sync_every_microbatch": False}


def train(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate({"duration": "10 steps", "global_batch_size": 8, "microbatch_size": 4} | settings)


@pytest.mark.parametrize(
    ("ranks", "platform", "dropout", "settings", "reason"),
    [
        (1, NVIDIA, 0.0, {}, None),
        (1, NVIDIA, 0.1, {}, None),
        (1, NVIDIA, 0.0, {"activation_checkpointing": {"type": "full"}}, None),
        (1, NVIDIA, 0.1, {"activation_checkpointing": {"type": "full"}}, "dropout"),
        (1, NVIDIA, 0.0, {"float8": {}, "precision": "amp_bf16"}, "float8"),
        (2, NVIDIA, 0.0, {}, "2 ranks gather"),
        (2, NVIDIA, 0.0, {"sharding": {"strategy": "grad_op"}, "microbatch_size": 2}, "in every microbatch"),
        (8, NVIDIA, 0.0, {"sharding": {"strategy": "full", "sync_every_microbatch": False}}, "8 ranks gather"),
        (2, NVIDIA, 0.0, {"sharding": ONCE}, None),
        (2, NVIDIA, 0.0, {"sharding": {"strategy": "grad_op"}}, None),  # a step is one microbatch
        (2, NVIDIA, 0.0, {"sharding": ONCE | {"reduce_dtype": "bf16"}, "precision": "amp_bf16"}, "in fp32"),
        (2, NVIDIA, 0.0, {"sharding": ONCE, "parallel": {"context": 2}}, "share"),
        (1, AMD, 0.0, {}, "AMD"),
        (1, AMD, 0.0, {"cuda_graphs": "on"}, None),
        (1, CPU, 0.0, {}, "need a GPU"),
    ],
)
def test_reasons_against_graphs(ranks: int, platform: Platform, dropout: float, settings: dict, reason: str | None):
    found = refusal(train(**settings), ranks, platform, dropout > 0)
    assert found is None if reason is None else reason in (found or "")


class Model:
    """What graphed_loss asks a model for."""

    def __init__(self, platform: Platform, dropout: float = 0.0):
        self.hybrid = self.config = self
        self.platform, self.dropout = platform, dropout

    def parameters(self) -> list[torch.Tensor]:
        return [torch.zeros(2)]


def made(platform: Platform, ranks: int = 1, **settings: Any) -> GraphedLoss | None:
    model: Any = Model(platform)
    config: Any = SimpleNamespace(
        train=train(**settings),
        model=SimpleNamespace(draws_in_training=False, counts_over_ranks=False),
        draws_in_training=False,
        grad_accum=lambda ranks: 2,
        objective=NextTokenSection(),
    )
    return graphed_loss(config, model, NextToken(), World(0, ranks, 0, ranks))


def test_auto_explains_what_rules_out_graphs_and_on_does_not_go_on_without(caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO", "llmtrain.run")
    assert made(NVIDIA, cuda_graphs="off") is None and not caplog.messages
    assert made(NVIDIA, ranks=2) is None
    assert caplog.messages == [f"CUDA graphs: off, as {refusal(train(), 2, NVIDIA, False)}"]
    with pytest.raises(UserError, match=r"train\.cuda_graphs = on: .* 2 ranks .*; use auto or off"):
        made(NVIDIA, ranks=2, cuda_graphs="on")
    graphs = made(NVIDIA, cuda_graphs="on")
    assert graphs is not None and graphs.required and graphs.microbatches == 2


@pytest.mark.parametrize(
    ("seconds", "setting", "taken"), [(0.1, "auto", True), (-0.1, "auto", False), (-0.1, "on", True)]
)
def test_several_ranks_take_graphs_by_what_they_gain_or_where_asked_for(seconds, setting, taken, caplog, monkeypatch):
    caplog.set_level("INFO", "llmtrain.run")
    monkeypatch.setattr(graph_gain, "gained_by_run", lambda *args: seconds)
    graphs = made(NVIDIA, 2, sharding=ONCE, cuda_graphs=setting)
    assert (graphs is not None) == taken
    assert len(caplog.messages) == (not taken)


class Loss(nn.Module):
    """A model that counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.calls = 0

    def context(self, ids: Tensor, document_ids: Tensor | None, segments: None) -> Context:
        return Context([], None)

    def forward(self, ids: Tensor, context: Context, output: object) -> Tensor:
        self.calls += 1
        return self.weight * ids.sum()


def test_graphs_are_tried_once_after_the_first_step_and_only_while_training(monkeypatch, caplog):
    tried: list[int] = []

    def fails(model: Loss, objective: object, batch: object) -> None:
        tried.append(model.calls)
        raise NoGraph("it is Monday")

    monkeypatch.setattr(cuda_graphs, "MicrobatchGraph", fails)
    model: Any = Loss()
    graphs, batch = GraphedLoss(model, NextToken(), microbatches=2), {"input_ids": torch.ones(2, 3)}
    with torch.no_grad():
        graphs(batch)
    model.eval()
    graphs(batch)
    assert model.calls == 2
    model.train()
    for number in range(5):
        model.weight.grad = torch.full((), float(number))  # of the microbatches before
        graphs(batch)
        assert float(model.weight.grad) == number
    assert tried == [4] and model.calls == 7  # two of validation, two of the first step
    assert caplog.messages == ["CUDA graphs: off, as they cannot be made: it is Monday"]


ONE = {"input_ids": torch.zeros(1), "labels": torch.zeros(1)}
"""A batch."""


class Replayed(MicrobatchGraph):
    """Two graphs whose backward pass adds 1, 2, 3 … to the sums, times the gradient of the loss."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters, self.sums = parameters, [torch.full_like(p, math.nan) for p in parameters]
        self.objective, self.batch = NextToken(), ONE
        self.anchor = torch.zeros((), requires_grad=True)
        zero = torch.zeros(())
        self.output = LossOutput(zero, {"cross_entropy": zero}, zero)
        self.d_loss, self.passes, self._forwards, self._backward_of = torch.ones(()), 0, 0, 0
        self.reached, self._within_step = list(range(len(parameters))), False
        self.weights = PersistentUnshardedWeights(nn.ParameterList(parameters))
        with self.weights.read():
            pass
        self.refreshed: list[int] = []  # before which passes
        self.weights.refresh = lambda: self.refreshed.append(self.passes + 1)
        self.forward_graph: Any = SimpleNamespace(replay=lambda: None)
        self.backward_graph: Any = self

    def replay(self) -> None:
        self.passes += 1
        for total in self.sums:
            total.add_(self.passes * self.d_loss)

    def step(self, *weights: float) -> list[float]:
        """The gradients after microbatches of these weights, of parameters that had none."""
        for parameter in self.parameters:
            parameter.grad = None
        for weight in weights:
            (self(ONE).loss * weight).backward()
        self.hand_over()
        return [float(p.grad) for p in self.parameters if p.grad is not None]


def test_gradients_of_microbatches_are_added_up_and_those_of_the_step_before_are_not():
    graph = Replayed([nn.Parameter(torch.zeros(())) for _ in range(2)])
    assert graph.step(1.0) == [1.0, 1.0]
    assert graph.step(0.5) == [1.0, 1.0]  # 0.5 * 2
    assert graph.step(1.0, 1.0, 1.0) == [12.0, 12.0]  # 3 + 4 + 5
    assert graph.step(1.0, 2.0) == [20.0, 20.0]  # 6 + 2 * 7


def test_weights_are_read_anew_by_the_first_microbatch_of_a_step_alone():
    graph = Replayed([nn.Parameter(torch.zeros(())) for _ in range(2)])
    graph.step(1.0)
    graph.step(1.0, 1.0, 1.0)
    graph.step(1.0)
    assert graph.refreshed == [1, 2, 5]


def test_gradients_are_added_to_those_that_other_microbatches_left():
    graph = Replayed([nn.Parameter(torch.zeros(())) for _ in range(2)])
    graph.step(1.0)
    graph.parameters[0].grad, graph.parameters[1].grad = torch.full((), 10.0), None
    graph(ONE).loss.backward()
    graph.hand_over()
    assert [float(p.grad) for p in graph.parameters if p.grad is not None] == [12.0, 2.0]


def test_nothing_is_handed_over_twice():
    graph = Replayed([nn.Parameter(torch.zeros(()))])
    assert graph.step(1.0) == [1.0]
    assert graph.step() == []


def test_graphs_serve_batches_of_their_shape_alone():
    graph = Replayed([])
    one, two = torch.zeros(1), torch.zeros(2)
    assert graph.serves(ONE) and graph.serves(ONE | {"sample_ids": two})  # which graphs do not read
    assert not graph.serves({"input_ids": two, "labels": two})
    assert not graph.serves(ONE | {"document_ids": one})
    assert not graph.serves(ONE | {"labels": one.long()})
