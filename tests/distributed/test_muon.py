"""Muon over several ranks: the matrices are gathered, computed by one rank each, and returned."""

import pytest
import torch

from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train.optim import build_optimizer
from tests.support.sharded import build_causal_lm
from tests.support.tiny import tiny_config

STEPS = 3


def losses_and_weights(model: CausalLM, optimizer: torch.optim.Optimizer, steps: int) -> dict[str, torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(64).reshape(2, 32) * (step + 2) % 300
        model.loss(tokens, tokens).loss.backward()
        optimizer.step()
    return {
        name: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone()  # type: ignore[operator]
        for name, p in model.hybrid.named_parameters()
    }


def sharded(config: Config) -> dict[str, torch.Tensor]:
    """A job: weights after `build_causal_lm`'s step and some more."""
    return losses_and_weights(*build_causal_lm(config), STEPS)


def plain(config: Config) -> dict[str, torch.Tensor]:
    """The same without shards."""
    model = HybridLM(config.model)
    model.init_weights(1)
    causal_lm, optimizer = CausalLM(model), build_optimizer(model, config.optimizer)
    tokens = torch.arange(64).reshape(2, 32)
    causal_lm.loss(tokens, tokens).loss.backward()
    optimizer.step()
    return losses_and_weights(causal_lm, optimizer, STEPS)


@pytest.mark.parametrize(
    ("size", "sharding"),
    [
        pytest.param(1, {}, marks=pytest.mark.ci),
        (2, {}),
        pytest.param(3, {}, marks=pytest.mark.ci),
        (4, {"strategy": "hybrid", "shard_size": 2}),
    ],
    ids=["1", "2", "3", "hybrid"],
)
def test_the_steps_of_many_ranks_are_those_of_one(ranks, shards, tmp_path, size, sharding):
    """Three ranks hold 11, 11 and 10 rows of 32; a matrix of 4 rows leaves one of them empty."""
    config = tiny_config(shards, tmp_path / "run", {"optimizer.type": "muon", "train.sharding": sharding})
    expected = plain(config)
    for found in ranks(size).run(sharded, config):
        assert found.keys() == expected.keys()
        for name, weight in expected.items():
            torch.testing.assert_close(found[name], weight, rtol=1e-5, atol=2e-5, msg=name)
