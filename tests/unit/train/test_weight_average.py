"""The moving average of the weights, by its formula."""

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llmtrain.schema.training import AverageConfig
from llmtrain.train.callbacks.weight_average import WeightAverage


def after(step: int) -> Any:
    return SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)))


def test_it_follows_the_weights():
    model = torch.nn.Linear(3, 2, bias=False)
    made = WeightAverage(model, AverageConfig(decay=0.4))
    made.begin()
    expected = model.weight.detach().clone()
    for step, decay in ((1, 2 / 11), (2, 3 / 12), (3, 4 / 13), (9, 0.4)):
        with torch.no_grad():
            model.weight.add_(1.0)
        made.batch_end(after(step), Mock())
        expected = decay * expected + (1 - decay) * model.weight.detach()
        torch.testing.assert_close(made.state_dict()["ema.weight"], expected)
    assert not torch.equal(made.averages["weight"], model.weight)


@pytest.mark.parametrize(("step", "decay"), [(0, 0.1), (1, 2 / 11), (90, 0.91), (10**6, 0.999)])
def test_decay_grows_to_the_settings(step, decay):
    assert AverageConfig(decay=0.999).decay_of(step) == pytest.approx(decay)
