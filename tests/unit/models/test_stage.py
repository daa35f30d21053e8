"""HybridLM.stage: stages, one after another, are the whole model."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from llmtrain.models.cache import Cache
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from tests.support.models import routed
from tests.unit.models.test_hybrid import BLOCKS, CPU, SHARED, tokens

LLAMA: dict[str, Any] = {"blocks": {"a": BLOCKS["gqa"]}, "layers": "a*4"}
MODELS: dict[str, dict[str, Any]] = {
    "llama": LLAMA | {"tie_embeddings": False, "positions": "learned"},
    "mamba2": {"blocks": {"m": BLOCKS["mamba"]}, "layers": "m*4", "tie_embeddings": True},
    "zamba2": {"blocks": {"m": BLOCKS["mamba"], "s": SHARED}, "layers": "m (s+m)*5", "tie_embeddings": True},
    "one shared block": {"blocks": {"m": BLOCKS["mamba"], "s": SHARED | {"n_shared": 1}}, "layers": "(s+m)*2 m*2"},
    "routers that hand on their states": {
        "blocks": {
            "s": SHARED | {"n_shared": 1},
            "f": BLOCKS["gqa"] | {"mlp": routed(False, choice_bias=False), "residual_scaling": True},
            "m": BLOCKS["mamba"],
            "c": BLOCKS["gqa"] | {"mlp": routed(True, choice_bias=False)},
        },
        "layers": "f c s+m c f m",
        "embedding_scaling": True,
    },
    "tied": LLAMA | {"tie_embeddings": True, "embedding_multiplier": 3.0, "logit_multiplier": 0.5},
}
CUTS = [(1,), (2,), (1, 2, 3)]


def config_of(name: str) -> ModelConfig:
    return ModelConfig.model_validate({"vocab_size": 80, "d_model": 32, "max_seq_len": 32, **MODELS[name]})


def meta(name: str) -> HybridLM:
    with torch.device("meta"):
        return HybridLM(config_of(name), CPU)


def built(model: HybridLM) -> HybridLM:
    model.to_empty(device="cpu")
    model.init_weights(seed=5)
    return model


def staged(model: HybridLM, cuts: Sequence[int]) -> list[HybridLM]:
    borders = [0, *cuts, len(model.blocks)]
    return [model.stage((borders[i], borders[i + 1])) for i in range(len(borders) - 1)]


def loss_of(stages: Sequence[HybridLM], apart: bool = False) -> torch.Tensor:
    """The loss, after the backward pass. apart: each stage has one of its own, from the gradients of what it returned, as ranks of
    a pipeline have."""
    ids, labels = tokens()[:, :-1], tokens()[:, 1:]
    stream: Any = ids
    borders: list[tuple[list[torch.Tensor], list[torch.Tensor]]] = []
    for stage in stages[:-1]:
        stream = stage(stream, stage.context(ids.shape[1], ids.device))
        if apart:
            returned = list(stream) if isinstance(stream, tuple) else [stream]
            received = [tensor.detach().requires_grad_() for tensor in returned]
            borders.append((returned, received))
            stream = tuple(received) if isinstance(stream, tuple) else received[0]
    last = CausalLM(stages[-1])
    context = stages[-1].context(ids.shape[1], ids.device)
    loss = last(stream, context, lambda hidden, head: last.cross_entropy(hidden, head, labels)).loss
    loss.backward()
    for returned, received in reversed(borders):
        torch.autograd.backward(returned, [tensor.grad for tensor in received])
    return loss.detach()


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_stages_one_after_another_are_the_model_bit_for_bit(name: str, cuts: tuple[int, ...]):
    whole, model = built(meta(name)), built(meta(name))
    assert torch.equal(loss_of(staged(model, cuts)), loss_of([whole]))
    for (key, mine), other in zip(model.named_parameters(), whole.parameters(), strict=True):
        assert mine.grad is not None and other.grad is not None
        assert torch.equal(mine.grad, other.grad), key


@pytest.mark.parametrize("cuts", CUTS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_stages_of_their_own_memory_are_initialised_and_add_up_to_the_model(name: str, cuts: tuple[int, ...]):
    """Each made on the meta device and allocated alone, as by a rank of a pipeline."""
    whole = built(meta(name))
    stages = [built(staged(meta(name), cuts)[i]) for i in range(len(cuts) + 1)]
    named = [(key, p) for stage in stages for key, p in stage.named_parameters()]
    weights = {key: parameter.detach() for key, parameter in named}
    whole.load_state_dict(weights)  # names and shapes, none missing
    expected = dict(built(meta(name)).named_parameters())
    assert all(torch.equal(parameter, expected[key]) for key, parameter in named)
    assert torch.equal(loss_of(stages, apart=True), loss_of([whole]))
    sums: dict[str, torch.Tensor] = {}
    for key, parameter in named:
        assert parameter.grad is not None, key
        sums[key] = sums.get(key, torch.zeros_like(parameter)) + parameter.grad
    for key, parameter in whole.named_parameters():
        held_once = [one for one, _ in named].count(key) == 1
        same = torch.equal if held_once else torch.allclose
        assert parameter.grad is not None and same(sums[key], parameter.grad), key


def test_a_stage_holds_what_it_uses():
    first, last = staged(meta("zamba2"), [2])
    assert {name.split(".")[0] for name, _ in first.named_parameters()} == {"embed", "shared", "blocks"}
    assert {name.split(".")[0] for name, _ in last.named_parameters()} == {"embed", "shared", "blocks", "norm"}
    assert [name for name, _ in first.shared.named_children()] == ["s"]
    assert [name for name, _ in first.shared["s"].named_children()] == ["0"]
    assert [name for name, _ in last.blocks.named_children()] == ["2", "3", "4", "5"]
    untied = staged(meta("llama"), [1, 3])
    parts = [{name.split(".")[0] for name, _ in stage.named_parameters()} for stage in untied]
    assert parts == [{"embed", "positions", "blocks"}, {"blocks"}, {"blocks", "norm", "head"}]
    assert sum(stage.flops(16).total for stage in untied) == meta("llama").flops(16).total


def test_each_stage_has_the_caches_of_its_layers():
    """Of those between the first and the last, which have no embedding, too."""
    whole = meta("zamba2")
    layers = [layer for part in staged(whole, (1, 2, 3)) for layer in Cache(part, 2, 8).layers]
    assert [one.nbytes for one in layers] == [one.nbytes for one in Cache(whole, 2, 8).layers]
