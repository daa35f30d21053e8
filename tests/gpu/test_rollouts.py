"""Rollouts of a policy on a GPU: copied weights are decoded by graphs that stay valid from rollout to rollout."""

from pathlib import Path

import pytest
import torch

from llmtrain.generate.decoding import DecodeStep
from llmtrain.train.report.loggers import read_metrics
from llmtrain.train.run import train
from tests.support.policy import policy_config, sums_data

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")]


@pytest.mark.parametrize("weights", ["copied", "gathered"])
def test_what_is_drawn_is_on_the_policy_in_each_step(weights: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In fp32; the learning rate is so high that weights of the step before would show (tests/distributed/test_policy.py)."""
    steps: list[DecodeStep] = []
    make = DecodeStep.__init__

    def made(self: DecodeStep, *args, **kwargs) -> None:
        steps.append(self)
        make(self, *args, **kwargs)

    monkeypatch.setattr(DecodeStep, "__init__", made)
    changes = {
        "objective.rollout": {"weights": weights},
        "optimizer.lr": 0.05,
        "train.precision": "fp32",
        "train.deterministic": False,
    }
    config = policy_config(sums_data(tmp_path), tmp_path / "run", changes)
    train(config)
    _, mismatch = read_metrics(tmp_path / "run" / "metrics.jsonl", "policy/mismatch")
    assert len(mismatch) == 4 and max(mismatch) < 1e-3
    largest = max(steps, key=lambda one: one.calls)
    assert largest.calls > 4 and (largest.graph is not None) == (weights == "copied")
