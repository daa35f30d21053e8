"""Inputs of recomputed layers in host memory: the same gradients, nothing else moved, and nothing left behind."""

import gc
import weakref

import pytest
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from llmtrain.kernels.platform import cpu
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.schema.config import Config
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations, offload_inputs
from llmtrain.train.ranks import host_inputs
from llmtrain.train.ranks.host_inputs import HostInputs
from tests.support.tiny import tiny_config

LAYERS = "m (s+m) m m"


@pytest.fixture(scope="module")
def config(shards, tmp_path_factory) -> Config:
    return tiny_config(shards, tmp_path_factory.mktemp("run"), {"model.layers": LAYERS})


@pytest.fixture
def kept(monkeypatch) -> list[weakref.ref]:
    """Everything that is kept in host memory."""
    found: list[weakref.ref] = []
    init = host_inputs._Kept.__init__

    def spied(self, x, *more):
        assert x.shape == (2, 32, 32)
        found.append(weakref.ref(self))
        init(self, x, *more)

    monkeypatch.setattr(host_inputs._Kept, "__init__", spied)
    return found


def gradients(config: Config, checkpointing: ActivationCheckpointing) -> list[torch.Tensor]:
    """Of two microbatches."""
    model = HybridLM(config.model, cpu())
    model.init_weights(1)
    checkpoint_activations(model, checkpointing)
    if checkpointing.offload:
        offload_inputs(model)
    for step in range(2):
        tokens = torch.arange(step, step + 64).reshape(2, 32)
        CausalLM(model).loss(tokens, tokens).loss.backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize(
    ("settings", "layers"), [({"type": "full"}, 4), ({"type": "every_k", "k": 2}, 2), ({"type": "kernels"}, 4)], ids=str
)
def test_gradients_are_the_same_bit_for_bit(config, kept, settings, layers):
    expected = gradients(config, ActivationCheckpointing(**settings))
    assert not kept
    found = gradients(config, ActivationCheckpointing(**settings, offload=True))
    assert len(kept) >= 2 * layers
    gc.collect()
    assert not any(ref() is not None for ref in kept)
    assert len(found) == len(expected) > 10
    for mine, reference in zip(found, expected, strict=True):
        assert torch.equal(mine, reference)


def test_a_compiled_layer_keeps_its_input_there_and_nothing_else(kept):
    layers = [torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.GELU(), torch.nn.Linear(48, 32)) for _ in range(3)]
    inputs = HostInputs()
    found = []
    for keep in (False, True):
        x = torch.ones(2, 32, 32, requires_grad=True)
        y = x * 1
        for layer in layers:
            wrapped = checkpoint_wrapper(layer, preserve_rng_state=False)
            forward = torch.compile(wrapped.forward, fullgraph=True, backend="aot_eager")
            y = inputs.keep(forward)(y) if keep else forward(y)
        y.sum().backward()
        assert x.grad is not None
        found.append(x.grad)
        assert len(kept) == 3 * keep
    assert torch.equal(*found)


@pytest.mark.parametrize(
    "settings", [{}, {"type": "selective"}, {"type": "auto"}, {"type": "budget", "fraction": 0.5}], ids=str
)
def test_it_is_refused_where_more_than_inputs_is_kept(settings):
    [problem] = ActivationCheckpointing.model_construct(
        **{**ActivationCheckpointing().model_dump(), **settings, "offload": True}
    ).problems()
    assert problem.path == "offload" and "type: full, every_k or kernels" in problem.message
