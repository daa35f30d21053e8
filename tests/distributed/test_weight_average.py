"""The moving average of weights that are sharded unevenly."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import torch

from llmtrain.distributed.world import world_from_environment
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.schema.training import AverageConfig
from llmtrain.train.callbacks.weight_average import WeightAverage
from llmtrain.train.optim import build_optimizer
from llmtrain.train.parallel import parallelize
from tests.support.tiny import tiny_config


def averages_and_weights(config: Config) -> list[tuple[str, torch.Tensor, list[torch.Tensor]]]:
    """A job: each parameter's name, its average after two steps, and its values before, between and after them; in full."""
    with torch.device("meta"):
        model = HybridLM(config.model)
    causal_lm = CausalLM(model)
    parallelize(causal_lm, config.train, world_from_environment(), torch.device("cpu"))
    average = WeightAverage(model, AverageConfig())
    model.init_weights(1)
    average.begin()
    optimizer = build_optimizer(model, config.optimizer)
    values = [_full(dict(model.named_parameters()))]
    for step in (1, 2):
        tokens = torch.arange(64).reshape(2, 32) + step
        causal_lm.loss(tokens, tokens).loss.backward()
        optimizer.step()
        now: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))
        average.batch_end(now, Mock())
        values.append(_full(dict(model.named_parameters())))
    averages = _full(average.averages)
    return [(name, averages[name], [value[name] for value in values]) for name in averages]


def _full(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().full_tensor().clone() for name, tensor in tensors.items()}


def test_every_rank_averages_its_rows(ranks, shards, tmp_path):
    """Three ranks hold 11, 11 and 10 rows of 32, and of 4 rows the last one has none."""
    for found in ranks(3).run(averages_and_weights, tiny_config(shards, tmp_path / "run")):
        for name, average, (start, first, second) in found:
            expected = start.lerp(first, 9 / 11).lerp(second, 9 / 12)
            torch.testing.assert_close(average, expected, msg=name)
