"""Weight decay by parameter, and the learning rate at the landmarks of every schedule."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.train.optim import LearningRate, build_optimizer
from tests.support.tiny import tiny_config

EVERY_KIND = {
    "model.positions": "learned",
    "model.tie_embeddings": False,
    "model.norm": {"type": "layernorm", "bias": True},
    "model.blocks.a": {
        "type": "attention",
        "n_heads": 2,
        "qk_norm": "head",
        "qkv_bias": True,
        "out_bias": True,
        "mlp": {"type": "gelu", "d_ff": 48, "bias": True},
    },
    "model.layers": "m (s+m)*2 a",
}


def config(changes: dict[str, Any]) -> Config:
    return tiny_config(Path("shards"), Path("run"), changes)


def groups(changes: dict[str, Any]) -> tuple[dict[str, float], HybridLM]:
    """Weight decay by parameter name."""
    made = config(EVERY_KIND | changes)
    with torch.device("meta"):
        model = HybridLM(made.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(model, made.optimizer)
    found = [(names[id(p)], group["weight_decay"]) for group in optimizer.param_groups for p in group["params"]]
    assert len(found) == len(dict(found)) == len(names)  # every parameter, once
    return dict(found), model


def test_matrices_decay_and_nothing_else_does():
    decay, model = groups({"optimizer.weight_decay": 0.2})
    kept = {name.rpartition(".")[2] for name, rate in decay.items() if rate == 0}
    assert {"A_log", "D", "dt_bias", "bias"} <= kept
    for name, parameter in model.named_parameters():
        is_scale = "norm" in name or name.rpartition(".")[2] in ("A_log", "D", "dt_bias", "bias")
        assert decay[name] == (0.0 if is_scale else 0.2), name
        assert is_scale == (parameter.ndim < 2), name
    assert any("conv.weight" in name for name in decay)


def test_embeddings_can_be_left_out_of_decay():
    with_them, _ = groups({})
    without, _ = groups({"optimizer.decay_embeddings": False})
    changed = {name for name in with_them if with_them[name] != without[name]}
    assert changed == {"embed.weight", "positions.weight"}


def test_the_optimizer_has_the_settings_of_the_config():
    made = config({"optimizer.betas": [0.8, 0.9], "optimizer.eps": 1e-6, "optimizer.lr": 0.5})
    with torch.device("meta"):
        optimizer = build_optimizer(HybridLM(made.model), made.optimizer)
    assert optimizer.defaults["betas"] == (0.8, 0.9)
    assert optimizer.defaults["eps"] == 1e-6 and optimizer.defaults["lr"] == 0.5


TOTAL = 100


def rate(schedule: dict[str, Any], steps_per_epoch: int | None = None) -> LearningRate:
    """lr = 1, so that rates are shares; 8 sequences of 32 tokens are 256 tokens a step."""
    changes = {"optimizer.lr": 1.0, "schedule": schedule, "train.duration": f"{TOTAL} steps"}
    return LearningRate(config(changes), TOTAL, steps_per_epoch)


WARMUP = {"warmup": "10 steps"}


@pytest.mark.parametrize(
    ("schedule", "landmarks"),
    [
        ({"type": "cosine", **WARMUP}, {0: 0.1, 4: 0.5, 9: 1.0, 10: 1.0, 55: 0.55, 100: 0.1, 200: 0.1}),
        ({"type": "cosine", **WARMUP, "final_lr_fraction": 0.0}, {10: 1.0, 40: 0.75, 55: 0.5, 70: 0.25, 100: 0.0}),
        ({"type": "linear", **WARMUP}, {0: 0.1, 10: 1.0, 55: 0.55, 100: 0.1}),
        ({"type": "linear", "final_lr_fraction": 0.5}, {0: 1.0, 50: 0.75, 100: 0.5}),
        ({"type": "constant", **WARMUP}, {0: 0.1, 9: 1.0, 99: 1.0}),
        ({"type": "inverse_sqrt", **WARMUP}, {0: 0.1, 9: 1.0, 10: 1.0, 40: 0.5, 90: 1 / 3}),
        ({"type": "wsd", **WARMUP, "decay": "20 steps"}, {0: 0.1, 10: 1.0, 80: 1.0, 90: 0.5, 95: 0.25, 100: 0.0}),
        ({"type": "wsd", "decay": "50 %", "final_lr_fraction": 0.2}, {0: 1.0, 50: 1.0, 75: 0.6, 100: 0.2}),
    ],
    ids=lambda value: value.get("type", ""),
)
def test_landmarks(schedule, landmarks):
    at = rate(schedule)
    assert {step: at(step) for step in landmarks} == pytest.approx(landmarks, abs=1e-12)


def test_a_cosine_is_one():
    at = rate({"type": "cosine", "final_lr_fraction": 0.0})
    assert [at(step) for step in range(TOTAL)] == pytest.approx(
        [(1 + math.cos(math.pi * step / TOTAL)) / 2 for step in range(TOTAL)]
    )


@pytest.mark.parametrize("warmup", ["20 steps", "5120 tokens", "5000 tokens", "20 %"])
def test_lengths_in_steps_tokens_and_fractions_agree(warmup):
    at = rate({"type": "cosine", "warmup": warmup})
    assert at.warmup == 20
    assert at(9) == pytest.approx(0.5)


def test_lengths_in_epochs():
    changes = {
        "optimizer.lr": 1.0,
        "schedule": {"type": "linear", "warmup": "0.5 epochs"},
        "train.duration": "2 epochs",
    }
    at = LearningRate(config(changes), total_steps=80, steps_per_epoch=40)
    assert at.warmup == 20
    assert at(80) == pytest.approx(0.1)
