"""float8 linear layers, emulated: the same over any number of ranks, and in checkpoints as if they were none."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from llmtrain.adapt.float8 import compute_scales_after_steps
from llmtrain.checkpoint import save_load
from llmtrain.checkpoint.local import folder_name
from llmtrain.models.causal_lm import CausalLM
from llmtrain.schema.config import Config
from tests.support import sharded
from tests.support.runs import read_tensors, train
from tests.support.tiny import BLOCKS, tiny_config

ATTENTION = {"type": "attention", "n_heads": 2, "position": {"type": "rotary"}, "mlp": {"type": "swiglu", "d_ff": 48}}
MODEL: dict[str, Any] = {
    "model.blocks": {**BLOCKS, "a": ATTENTION},
    "model.layers": "m (s+m) a",
    "train.precision": "amp_bf16",
}
FLOAT8 = {"emulate": True, "small_products": True}
EXPERTS = ATTENTION | {"mlp": {"type": "experts", "n_experts": 4, "top_k": 2, "d_ff": 48, "balance": {"weight": 0.0}}}
OF_EXPERTS: dict[str, Any] = {"model.blocks": {**BLOCKS, "a": EXPERTS}, "model.layers": "m (s+m) a"}


def config_of(shards: Path, run_dir: Path, float8: dict[str, Any] | None, **more: Any) -> Config:
    return tiny_config(shards, run_dir, {**MODEL, "train.float8": float8, **more})


def losses_and_weights(config: Config, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """A job: the losses of some steps after the first, and the parameters after them, in full."""
    model, losses = _steps(config, steps)
    return losses, {name: full(p) for name, p in save_load.flat_state(model.hybrid, None).items()}


def losses_of(config: Config) -> list[float]:
    return _steps(config, 3)[1]


def _steps(config: Config, steps: int) -> tuple[CausalLM, list[float]]:
    model, optimizer = sharded.build_causal_lm(config)
    if config.train.float8 is not None and config.train.float8.gathers:
        compute_scales_after_steps(model, optimizer)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        tokens = torch.arange(64).reshape(2, 32) * (step + 2) % 300
        loss = model.loss(tokens, tokens).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model, losses


def full(tensor: torch.Tensor) -> torch.Tensor:
    assert isinstance(tensor, DTensor)
    assert type(tensor.to_local()) is torch.Tensor  # as a checkpoint and its hashes take it
    return tensor.full_tensor().detach().clone()


@pytest.mark.parametrize(
    "recipe", ["tensorwise", *(pytest.param(name, marks=pytest.mark.ci) for name in ("rowwise", "rowwise_with_gw_hp"))]
)
def test_ranks_compute_what_one_computes(ranks, shards, tmp_path, recipe):
    """The scale of a tensor is that of all of its rows. Three ranks hold them unevenly and gather bf16, which rounds twice."""
    config = config_of(shards, tmp_path, {**FLOAT8, "recipe": recipe})
    [(losses, expected)] = ranks(1).run(losses_and_weights, config)
    for found, weights in ranks(2).run(losses_and_weights, config):
        assert found == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    for found, _ in ranks(3).run(losses_and_weights, config):
        assert found == pytest.approx(losses, abs=0.02)


def test_float8_rounds_what_bf16_does_not(ranks, shards, tmp_path):
    """With more rounding, about the same losses."""
    [(exact, _)] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, None))
    [(rounded, _)] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, FLOAT8))
    assert rounded != pytest.approx(exact, abs=1e-5)
    assert rounded == pytest.approx(exact, abs=0.05)


@pytest.mark.parametrize("recipe", ["tensorwise", pytest.param("rowwise", marks=pytest.mark.ci)])
def test_ranks_that_divide_experts_compute_what_one_computes(ranks, shards, tmp_path, recipe):
    """tensorwise, the scale of rows is that of the rows of a rank: the same but for rounding."""
    float8 = {**FLOAT8, "recipe": recipe, "experts": True}
    [(losses, expected)] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, float8, **OF_EXPERTS))
    [(exact, _)] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, None, **OF_EXPERTS))
    assert losses != pytest.approx(exact, abs=1e-5) and losses == pytest.approx(exact, abs=0.05)
    for found, weights in ranks(2).run(losses_and_weights, config_of(shards, tmp_path, float8, **OF_EXPERTS)):
        assert found == pytest.approx(losses, abs=1e-5)
        torch.testing.assert_close(weights, expected, rtol=1e-5, atol=1e-5)
    divided = config_of(shards, tmp_path, float8, **OF_EXPERTS, **{"train.parallel.expert": 2})
    for found in ranks(2).run(losses_of, divided):
        assert found == pytest.approx(losses, abs=1e-5 if recipe == "rowwise" else 0.02)


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_recomputed_activations_change_nothing(ranks, shards, tmp_path, kind, recipe):
    float8 = {**FLOAT8, "recipe": recipe, "experts": True}
    checkpointing = {"train.activation_checkpointing": {"type": kind}} | OF_EXPERTS
    [kept] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, float8, **OF_EXPERTS))
    [recomputed] = ranks(1).run(losses_and_weights, config_of(shards, tmp_path, float8, **checkpointing))
    assert recomputed[0] == kept[0]
    torch.testing.assert_close(recomputed[1], kept[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    "optimizer",
    [
        *(pytest.param(name, marks=pytest.mark.ci) for name in ("adamw", "muon")),
        pytest.param("adamw_8bit", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_and_without_float8(ranks, shards, tmp_path, optimizer):
    """Two ranks begin in float8, one goes on in bf16, two end in float8 again: checkpoints and losses are of one run."""
    more = {"train.ema": {}, "optimizer.type": optimizer, "train.duration": "6 steps", "checkpoint.interval": "2 steps"}
    [expected] = ranks(1).run(train, config_of(shards, tmp_path / "bf16", None, **more))
    for size, float8, stop in ((2, FLOAT8, 2), (1, None, 4), (2, FLOAT8, None)):
        run = ranks(size).run(train, config_of(shards, tmp_path / "mixed", float8, **more), stop)[0]
    assert list(run.losses) == [1, 2, 3, 4, 5, 6]
    assert list(run.losses.values()) == pytest.approx(list(expected.losses.values()), abs=0.05)
    assert run.losses != expected.losses
    plain, mixed = (read_tensors(tmp_path / folder / "checkpoints" / folder_name(6)) for folder in ("bf16", "mixed"))
    assert {name: getattr(value, "shape", None) for name, value in plain.items()} == {
        name: getattr(value, "shape", None) for name, value in mixed.items()
    }
