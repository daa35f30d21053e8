"""A value that goes from layer to layer beside the hidden states: ZAYA1's router states."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from llmtrain.kernels import platform
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.feed_forward.routers import Routing
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.init import clean_name
from llmtrain.models.sections.experts import RouterSection
from llmtrain.schema.training import ActivationCheckpointing
from llmtrain.train.parallel import checkpoint_activations
from tests.support.models import ATTENTION, MODELS, routed

NAMES = [name for name in MODELS if "states" in name]
SIZES: dict[str, Any] = {"vocab_size": 97, "d_model": 32, "max_seq_len": 64}


def built(name: str) -> HybridLM:
    """With every parameter away from its initial value."""
    model = HybridLM(ModelConfig.model_validate(SIZES | MODELS[name]), platform.cpu(), torch.float32)
    model.init_weights(seed=3)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def gradients(model: HybridLM) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 97, (2, 17), generator=torch.Generator().manual_seed(0))
    CausalLM(model).loss(ids, ids.roll(-1, 1)).loss.backward()
    found = {clean_name(name): parameter.grad for name, parameter in model.named_parameters()}
    assert all(gradient is not None and gradient.any() for gradient in found.values())
    return found  # type: ignore[return-value]


@pytest.mark.parametrize("kind", ["full", "kernels", "selective"])
@pytest.mark.parametrize("name", NAMES)
def test_recomputed_layers_have_the_same_gradients(name, kind):
    model = built(name)
    checkpoint_activations(model, ActivationCheckpointing.model_validate({"type": kind}))
    found, expected = gradients(model), gradients(built(name))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def layers(pattern: str, **mlps: dict[str, Any]) -> dict[str, Any]:
    return {"blocks": {name: ATTENTION | {"mlp": mlp} for name, mlp in mlps.items()}, "layers": pattern}


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (layers("c*2", c=routed(True)), "layer 0 reads a state of 10 channels, but the layers before it hand on none"),
        (
            layers("f c", c=routed(True), f=routed(False) | {"router": {"mlp": {"width": 12}}}),
            "layer 1 reads a state of 10 channels, but the layers before it hand on one of 12",
        ),
        (layers("f", f=routed(False) | {"top_k": 2}), "is for top_k: 1, not 2"),
        (layers("f", f=routed(False) | {"router": {"bias": True, "mlp": {"width": 4}}}), "is of the linear map"),
        (
            {"blocks": {"a": ATTENTION | {"parallel": True, "residual_scaling": True}}, "layers": "a"},
            "scales one branch after another",
        ),
    ],
)
def test_rejects_states_that_are_not_there_and_settings_that_exclude_each_other(model, reason):
    with pytest.raises(ValidationError, match=reason):
        ModelConfig.model_validate(SIZES | model)


def test_tokens_that_choose_no_expert_add_nothing_and_are_spread():
    chosen, weights = torch.tensor([[3], [0], [3], [3]]), torch.tensor([[0.5], [0.25], [0.75], [0.1]])
    found = Routing(chosen, weights, torch.empty(4, 4)).met(RouterSection(skip=True), 3)
    assert found[0].flatten().tolist() == [0, 0, 2, 0] and found[1].flatten().tolist() == [0, 0.25, 0, 0]


def test_a_state_crosses_the_stages_that_need_it():
    with torch.device("meta"):
        name = "attention with routers that hand on their states, past layers that do not"
        model = HybridLM(ModelConfig.model_validate(SIZES | MODELS[name]), platform.cpu())
    assert [model.crossing(border).channels(32) for border in range(1, 4)] == [(32, 10)] * 3
