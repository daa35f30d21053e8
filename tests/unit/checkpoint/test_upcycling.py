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


def dense_config(kind: str = "relu2", d_ff: int = 24) -> ModelConfig:
    plain = experts.config().model_dump()
    for name in ("a", "m"):
        plain["blocks"][name]["mlp"] = {"type": kind, "d_ff": d_ff, "bias": True}
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


def upcycled(folder: Path, tmp_path: Path, **settings: Any) -> tuple[HybridLM, str]:
    config = experts.config(bias=True, **settings)
    model = HybridLM(config, platform.cpu())
    model.init_weights(2)
    optimizer = build_optimizer(model, tiny_config(tmp_path, tmp_path).optimizer)
    wanted = InitialWeights.model_validate({"path": str(folder), "upcycle": True})
    loaded = load_part(folder, manifests.read(folder), model, optimizer, wanted, verify=True)
    return model, loaded.summary()


@pytest.mark.parametrize("settings", [{}, {"top_k": 4}, {"router": {"type": "top_k_softmax"}}, {"top_k": 1}])
def test_logits_at_first_are_those_of_the_dense_model(tmp_path, settings):
    dense = saved(dense_config(), tmp_path / "dense")
    model, said = upcycled(tmp_path / "dense", tmp_path, **settings)
    tokens = torch.randint(VOCAB, (2, 17), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected, found = (CausalLM(one).eval().logits(tokens) for one in (dense, model))
    assert float((found - expected).norm() / expected.norm()) < 1e-6
    assert "left fresh, 2 of the model: blocks.0.mlp.router.weight, blocks.1.mlp.router.weight" in said
    assert "skipped" not in said


def test_rejects_a_dense_layer_of_another_width(tmp_path):
    saved(dense_config(d_ff=32), tmp_path / "dense")
    with pytest.raises(CheckpointError, match=r"blocks.0.mlp.experts.w_in is missing"):
        upcycled(tmp_path / "dense", tmp_path)


def test_rejects_routers_whose_weights_do_not_sum_to_one():
    def found(model: ModelConfig, upcycle: bool = True) -> list[str]:
        config: Any = SimpleNamespace(init_from=InitialWeights(path="x", upcycle=upcycle), model=model)
        return [problem.path for problem in _upcycling_problems(config)]

    odd = {"renormalize": False, "scale": 2.5}
    paths = [f"model.blocks.{name}.mlp.router.{key}" for name in "am" for key in ("renormalize", "scale")]
    assert found(experts.config(router=odd)) == paths and not found(experts.config(router=odd), upcycle=False)
    assert not found(experts.config()) and found(dense_config()) == ["init_from.upcycle"]
