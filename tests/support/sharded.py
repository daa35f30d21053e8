"""A small model sharded over the ranks of a test, and what to compare of it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.retention import Retention
from llmtrain.distributed.world import gloo_group, world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.objectives.next_token import NextToken
from llmtrain.schema.config import Config
from llmtrain.train.optim import build_optimizer
from llmtrain.train.optimizers.host_state import HostState
from llmtrain.train.parallel import parallelize
from llmtrain.train.pipeline.schedule import PipelineStep
from llmtrain.train.pipeline.stages import StagedLM, shared_gradients
from llmtrain.train.step import GradientSync


def build(config: Config, seed: int = 1) -> tuple[HybridLM, torch.optim.Optimizer]:
    """A sharded model with an optimizer that has taken a step."""
    causal_lm, optimizer = build_causal_lm(config, seed)
    return causal_lm.hybrid, optimizer


def build_causal_lm(config: Config, seed: int = 1) -> tuple[CausalLM, torch.optim.Optimizer]:
    """The same, to be trained further."""
    with torch.device("meta"):
        model = HybridLM(config.model)
    parallel = config.train.parallel
    causal_lm = (StagedLM if parallel.pipeline > 1 else CausalLM)(model)
    world = world_from_environment().split(parallel.context, parallel.tensor, parallel.pipeline)
    parallelize(causal_lm, config.train, world, torch.device("cpu"))
    model = causal_lm.hybrid
    model.init_weights(seed)
    optimizer = build_optimizer(model, config.optimizer)
    tokens = torch.arange(64).reshape(2, 32)
    if isinstance(causal_lm, StagedLM):
        sync = GradientSync(causal_lm, config.train.sharding)
        tokens = tokens.reshape(-1, 16)  # four microbatches
        batch = {"input_ids": tokens, "labels": tokens, "sample_ids": torch.arange(len(tokens))}
        PipelineStep(causal_lm, NextToken(), 1, sync, gloo_group()).forward_backward(batch, lambda *_: None)
    else:
        causal_lm.loss(tokens, tokens).loss.backward()
    if (divided := shared_gradients(causal_lm)) is not None:
        divided.add_up()
    optimizer.step()
    return causal_lm, optimizer


def state_of(model: HybridLM, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    moments = [value for state in optimizer.state.values() for value in state.values()]
    return [
        (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone() for t in [*model.parameters(), *moments]
    ]


def write(
    root: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    keep_last: int | None = None,
    keep_every: int | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """Save one checkpoint under `root`. Called by every rank."""
    state = save_load.flat_state(model, optimizer)
    run = save_load.RunState(step, 0, config or {}, {}, {})
    return save_load.write(root, state, save_load.local_tensors(state), run, Retention(keep_last, keep_every))


def state_after(config: Config, load: Path | None, save: Path | None, steps: int) -> dict[str, torch.Tensor]:
    """Weights and optimizer state after steps with given gradients, of which one parameter has none. load, save: a checkpoint
    before, and after."""
    model, optimizer = build(config)
    optimizer.state.clear()
    if config.optimizer.offload:
        assert isinstance(optimizer, HostState)
        optimizer.at_once = 700  # elements: several parameters of a tiny model, or one that is larger
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * number)
    if load is not None:
        save_load.load(load, model, optimizer)
    hooked = []
    optimizer.register_step_post_hook(lambda *_: hooked.append(1))
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * (step + 10 * (load is not None)) + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
            if number == 3:
                parameter.grad = None
        optimizer.step()
    if config.optimizer.type == "adamw":  # in a process with one of these too, the others call AdamW's hooked step
        assert len(hooked) == steps
    if save is not None:
        write(save, model, optimizer, step=steps)
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
            found[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same names, and tensors that are equal bit by bit."""
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
