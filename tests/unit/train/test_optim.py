"""Weight decay and learning rate by parameter."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.schema.schedule import Schedule
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.optim import LearningRate, build_optimizer, learning_rates
from llmtrain.train.parallel import checkpoint_activations
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


def test_frozen_parameters_are_in_no_group():
    made = config(EVERY_KIND)
    with torch.device("meta"):
        model = HybridLM(made.model)
    model.blocks[0].requires_grad_(False)
    optimizer = build_optimizer(model, made.optimizer)
    found = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    assert found == {id(parameter) for parameter in model.parameters() if parameter.requires_grad} and len(found) > 9


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


def settings_of(changes: dict[str, Any]) -> dict[str, tuple[float, float]]:
    """(peak learning rate, weight decay) by parameter name."""
    made = config(EVERY_KIND | changes)
    with torch.device("meta"):
        model = HybridLM(made.model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = build_optimizer(model, made.optimizer).param_groups
    found = {names[id(p)]: (group["lr"], group["weight_decay"]) for group in groups for p in group["params"]}
    assert len(found) == len(names) == sum(len(group["params"]) for group in groups)
    return found


def test_an_entry_of_groups_sets_what_it_names_and_nothing_else():
    plain = settings_of({"optimizer.lr": 0.01})
    changed = settings_of(
        {
            "optimizer.lr": 0.01,
            "optimizer.groups": [
                {"match": "*.A_log", "lr_factor": 0.5},
                {"match": "embed.weight", "lr": 0.002, "weight_decay": 0.0},
                {"match": "norm.weight", "weight_decay": 0.3},
            ],
        }
    )
    assert {name for name in plain if plain[name] != changed[name]} == {
        *(name for name in plain if name.endswith("A_log")),
        "embed.weight",
        "norm.weight",
    }
    assert changed["blocks.0.mixer.ssm.A_log"] == (0.005, 0.0)
    assert changed["embed.weight"] == (0.002, 0.0)
    assert changed["norm.weight"] == (0.01, 0.3)


def test_of_overlapping_entries_each_setting_is_the_last_ones():
    groups = [{"match": "blocks.*", "lr": 0.1, "weight_decay": 0.2}, {"match": "blocks.0.*", "lr": 0.3}]
    found = settings_of({"optimizer.groups": groups})
    assert found["blocks.0.mixer.in_proj.weight"] == (0.3, 0.2)
    assert found["blocks.1.mixer.in_proj.weight"] == (0.1, 0.2)


def test_checkpointed_layers_are_matched_by_the_same_names():
    made = config({"optimizer.groups": [{"match": "blocks.0.mixer.*", "lr": 0.5}]})
    with torch.device("meta"):
        model = HybridLM(made.model)
    checkpoint_activations(model, ActivationCheckpointing(type="full"))
    groups = build_optimizer(model, made.optimizer).param_groups
    matched = {id(p) for group in groups for p in group["params"] if group["lr"] == 0.5}
    assert matched == {id(p) for p in model.layer_mixers()[0][0].parameters()}


def test_the_schedule_shapes_the_rate_of_every_group():
    schedule = Schedule("linear", 0.4, total=10, warmup=4, decay=0, final=0.5)
    optimizer = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": peak} for peak in (0.4, 0.1, 0.0)])
    callback = LearningRate(schedule, learning_rates(optimizer))
    for step in (0, 3, 6, 9):
        now: Any = SimpleNamespace(timestamp=SimpleNamespace(batch=SimpleNamespace(value=step)), optimizers=[optimizer])
        callback.batch_start(now, Mock())
        rate = schedule(step)
        assert learning_rates(optimizer) == pytest.approx([rate, rate / 4, 0.0])


def test_without_groups_the_optimizer_has_those_two_and_the_schedules_very_rate():
    made = config({"optimizer.lr": 0.3})
    with torch.device("meta"):
        optimizer = build_optimizer(HybridLM(made.model), made.optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert LearningRate(Schedule("constant", 0.3, 10, 0, 0, 0.0), learning_rates(optimizer)).factors == [1.0, 1.0]
