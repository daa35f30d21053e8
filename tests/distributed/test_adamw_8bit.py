"""8-bit AdamW over several ranks: codes, scales and steps are those of one rank, and checkpoints move between rank counts."""

from pathlib import Path

import pytest
import torch
from torch.distributed.tensor import DTensor, distribute_tensor

from llmtrain.checkpoint import save_load
from llmtrain.schema.config import Config
from tests.support import sharded
from tests.support.tiny import tiny_config


def state_after(config: Config, load: Path | None, save: Path | None, steps: int) -> dict[str, torch.Tensor]:
    """A job: weights and optimizer state after steps with given gradients. load, save: a checkpoint before, and after."""
    model, optimizer = sharded.build(config)
    with torch.no_grad():
        for number, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * number)
    optimizer.state.clear()
    if load is not None:
        save_load.load(load, model, optimizer)
    for step in range(steps):
        for number, parameter in enumerate(model.parameters()):
            generator = torch.Generator().manual_seed(1000 * (step + (load is not None)) + number)
            gradient = torch.randn(parameter.shape, generator=generator)
            assert isinstance(parameter, DTensor)
            parameter.grad = distribute_tensor(gradient, parameter.device_mesh, parameter.placements)
        optimizer.step()
    if save is not None:
        save = sharded.write(save, model, optimizer, step=steps)
    found = {}
    for name, parameter in model.named_parameters():
        for key, value in {"weight": parameter, **optimizer.state[parameter]}.items():
            found[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value
    return {name: value.detach().clone() for name, value in found.items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype and torch.equal(found[name], value), name


@pytest.fixture(scope="module")
def config(shards, tmp_path_factory) -> Config:
    """Three ranks hold 11, 11 and 10 rows of 32; a matrix of 4 rows leaves one of them empty."""
    return tiny_config(shards, tmp_path_factory.mktemp("run"), {"optimizer.type": "adamw_8bit"})


@pytest.mark.ci
def test_many_ranks_are_bit_identical_to_one_and_continue_each_others_checkpoints(ranks, config, tmp_path):
    [one] = ranks(1).run(state_after, config, None, tmp_path / "one", 1)
    [more] = ranks(1).run(state_after, config, tmp_path / "one" / "step-00000001", None, 1)
    codes = [name for name in one if name.endswith("_codes")]
    assert len(codes) > 10 and all(one[name].dtype == torch.uint8 for name in codes)
    assert any(not torch.equal(one[name], more[name]) for name in codes)
    for size in (2, 3):
        for found in ranks(size).run(state_after, config, None, tmp_path / str(size), 1):
            assert_same(found, one)
        for found in ranks(size).run(state_after, config, tmp_path / "one" / "step-00000001", None, 1):
            assert_same(found, more)
    for found in ranks(2).run(state_after, config, tmp_path / "3" / "step-00000001", None, 1):
        assert_same(found, more)
