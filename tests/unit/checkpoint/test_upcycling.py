"""`init_from` with `upcycle`: experts that begin as copies of a dense MLP."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from llmtrain.checkpoint.format import manifest as manifests
from llmtrain.checkpoint.format.manifest import CheckpointError, Manifest
from llmtrain.checkpoint.initial_weights import _upcycling_problems
from llmtrain.checkpoint.partial_load import load_part
from llmtrain.convert.lazy_checkpoint import LazyTensor, write_parameters
from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.init_from import InitialWeights
from llmtrain.train.optim import build_optimizer
from tests.support import experts
from tests.support.models import VOCAB
from tests.support.tiny import tiny_config

SAVE_ID = "00000000-0000-4000-8000-000000000000"


def dense_config(kind: str = "relu2", d_ff: int = 24, **more: Any) -> ModelConfig:
    plain = experts.config().model_dump()
    for name in ("a", "m"):
        plain["blocks"][name]["mlp"] = {"type": kind, "d_ff": d_ff, "bias": True, **more}
    return ModelConfig.model_validate(plain)


def saved(config: ModelConfig, folder: Path) -> HybridLM:
    """A model of random weights, and its checkpoint."""
    model = HybridLM(config, platform.cpu())
    model.init_weights(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(parameter.numel()))
    folder.mkdir()
    lazy = [LazyTensor(name, tuple(p.shape), partial(p.detach().clone)) for name, p in model.named_parameters()]
    files = write_parameters(folder, lazy, lambda count: None, SAVE_ID)
    config_of = {"model": config.model_dump(mode="json"), "data": {"prepare": None, "train": None}}
    manifests.write(folder, Manifest(SAVE_ID, 0, 0, config=config_of, clock={}, data={}, versions={}, files=files))
    return model


def upcycled(folder: Path, tmp_path: Path, more: Any = None, **settings: Any) -> tuple[HybridLM, str]:
    """more: settings of init_from."""
    config = experts.config(**{"bias": True, **settings})
    model = HybridLM(config, platform.cpu())
    model.init_weights(2)
    optimizer = build_optimizer(model, tiny_config(tmp_path, tmp_path).optimizer)
    wanted = InitialWeights.model_validate({"path": str(folder), "upcycle": True, **(more or {})})
    loaded = load_part(folder, manifests.read(folder), model, optimizer, wanted, verify=True)
    return model, loaded.summary()


BESIDE = {"shared": {"type": "relu2", "d_ff": 12, "bias": True}, "shared_gate": True}


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"router": {"type": "top_k_softmax"}}, {"top_k": 1}, BESIDE])
def test_logits_at_first_are_those_of_the_dense_model(tmp_path, settings):
    dense = saved(dense_config(), tmp_path / "dense")
    model, said = upcycled(tmp_path / "dense", tmp_path, **settings)
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = (CausalLM(one).eval().logits(tokens) for one in (dense, model))
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    fresh = "12 of the model" if "shared" in settings else "2 of the model: blocks.0.mlp.router.weight, blocks.1."
    assert f"left fresh, {fresh}" in said and "skipped" not in said
    if "shared" in settings:  # and is trained
        CausalLM(model).loss(tokens, tokens).loss.backward()
        gradient = model.get_parameter("blocks.0.mlp.shared.w_out.weight").grad
        assert gradient is not None and gradient.any()


def test_copies_may_get_noise(tmp_path):
    dense = saved(dense_config(), tmp_path / "dense").get_parameter("blocks.0.mlp.w_in.weight")
    model, _ = upcycled(tmp_path / "dense", tmp_path, {"upcycle_noise": 0.25})
    noise = (model.get_parameter("blocks.0.mlp.experts.w_in") - dense).detach()
    assert float(noise.square().mean().sqrt() / dense.square().mean().sqrt()) == pytest.approx(0.25, rel=0.1)
    assert float((noise[0] * noise[1]).mean()) < 0.1 * float(noise.square().mean())  # each expert's own


@pytest.mark.parametrize("activation", ["relu2", "swiglu"])
def test_a_share_of_each_experts_channels_may_start_fresh(tmp_path, activation):
    """Of a channel all its rows of the first matrix, its bias and its column of the second one; other ones in each expert."""
    dense = saved(dense_config(activation), tmp_path / "dense")
    model, _ = upcycled(tmp_path / "dense", tmp_path, {"upcycle_drop": 0.25}, activation=activation)
    mlp: Any = dense.get_submodule("blocks.1.mlp")
    made: Any = model.get_submodule("blocks.1.mlp.experts")
    fresh = (made.w_out != mlp.w_out.weight).all(1)
    assert torch.equal((made.w_out != mlp.w_out.weight).any(1), fresh) and fresh.sum(1).tolist() == [6, 6, 6, 6]
    of_rows = fresh.repeat(1, 1 if activation == "relu2" else 2)
    assert torch.equal((made.w_in != mlp.w_in.weight).all(2), of_rows)
    assert torch.equal((made.w_in != mlp.w_in.weight).any(2), of_rows)
    assert torch.equal(made.b_in != mlp.w_in.bias, of_rows) and bool((made.b_out == mlp.w_out.bias).all())
    assert not torch.equal(fresh[0], fresh[1])
    drawn, of = made.w_in[of_rows], mlp.w_in.weight
    assert float(drawn.std()) == pytest.approx(float(of.std()), rel=0.15)


def test_rejects_changes_of_copies_that_there_are_not():
    wanted = InitialWeights.model_validate({"path": "x", "upcycle_noise": 0.1, "upcycle_drop": 0.5})
    found: Any = SimpleNamespace(init_from=wanted, model=experts.config())
    assert [one.path for one in _upcycling_problems(found, {})] == ["init_from.upcycle_noise", "init_from.upcycle_drop"]


def test_rejects_a_dense_layer_of_another_width(tmp_path):
    saved(dense_config(d_ff=32), tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"blocks.0.mlp.experts.w_in is missing"):
        upcycled(tmp_path / "dense", tmp_path)


def problems(model: ModelConfig, dense: ModelConfig | None = None, **more: Any) -> list[str]:
    wanted = InitialWeights.model_validate({"path": "x", "upcycle": True, **more})
    config: Any = SimpleNamespace(init_from=wanted, model=model)
    found = _upcycling_problems(config, (dense or dense_config()).model_dump(mode="json"))
    return [f"{problem.path}: {problem.message}" for problem in found]


def test_rejects_layers_that_would_not_compute_what_the_dense_ones_did():
    """Of the experts each setting, at its own path, once for all layers of a block."""
    biased = experts.config(bias=True)
    settings: dict[str, Any]
    assert not problems(biased) and problems(biased, upcycle=False) == []
    for settings, path in (
        ({"router": {"renormalize": False}}, "router.renormalize"),
        ({"router": {"scale": 2.5}}, "router.scale"),
        ({"router": {"skip": True}, "top_k": 1}, "router.skip"),
        ({"latent": 16}, "latent"),
        ({"activation": "gelu"}, "activation"),
        ({"bias": False}, "bias"),
    ):
        found = [one.partition(":")[0] for one in problems(experts.config(**{"bias": True} | settings))]
        assert found == [f"model.blocks.{name}.mlp.{path}" for name in "am"], settings
    text = "model.blocks.a.mlp.d_ff: must be 32, as mlp.d_ff of the checkpoint of init_from"
    assert problems(biased, dense_config(d_ff=32))[0] == text
    assert not problems(biased, dense_config(d_ff=32), strict=False)
    (name,) = [one.partition(":")[0] for one in problems(dense_config())]
    assert name == "init_from.upcycle"


def test_rejects_dense_layers_with_factors_that_experts_have_not():
    (found,) = problems(experts.config(bias=True), dense_config(out_multiplier=0.5))
    assert found.startswith("init_from.upcycle: cannot make experts") and "out_multiplier is 0.5" in found
