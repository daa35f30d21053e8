"""What surrounds a mixer: places of norms, branches side by side, factors; and which of these do not go together."""

from typing import Any, cast

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from llmtrain.kernels import platform
from llmtrain.models.block import Block
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.config import ModelConfig
from llmtrain.models.feed_forward.dense import MLP
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.dense import MLPSection
from llmtrain.models.sections.layers import NormConfig

ATTENTION: dict[str, Any] = {"type": "attention", "n_heads": 2, "mlp": {"type": "relu2", "d_ff": 24}}
FACTORS = {"activation_multiplier": 0.5, "out_multiplier": 3.0}
SHARED = {"type": "shared_attention", "n_heads": 2, "mlp": {"d_ff": 24}}


def config(block: dict[str, Any] | None = None, **model: Any) -> ModelConfig:
    blocks = {"x": ATTENTION | (block or {})}
    return ModelConfig.model_validate({"vocab_size": 50, "d_model": 16, "blocks": blocks, "layers": "x", **model})


def build(made: ModelConfig) -> HybridLM:
    model = HybridLM(made, platform.cpu())
    model.init_weights(seed=1)
    return model


@pytest.mark.parametrize("place", ["before", "after", "both"])
@pytest.mark.parametrize("parallel", [False, True])
@torch.no_grad()
def test_a_layer_is_what_the_settings_say(place, parallel):
    factors = {"residual_multiplier": 0.5, "input_multiplier": 0.25}
    made = config({"parallel": parallel} | factors, norm={"place": place}, embedding_multiplier=3.0)
    model = build(made)
    (layer,) = cast("list[Block]", model.blocks)
    assert layer.mlp is not None
    ids = torch.arange(12).view(1, 12)
    context = model.context(12, ids.device)

    def norm(x: Tensor, name: str) -> Tensor:
        return getattr(layer, name)(x)

    def mixer(x: Tensor) -> Tensor:
        return layer.mixer(0.25 * x, context.blocks[0].mixer)

    x = 3 * model.embed(ids)
    if place == "before":
        mixed = 0.5 * mixer(norm(x, "norm"))
        read = x if parallel else x + mixed
        expected = x + mixed + 0.5 * layer.mlp(norm(read, "mlp_norm"))
    elif place == "after":
        mixed = 0.5 * norm(mixer(x), "norm")
        read = x if parallel else x + mixed
        expected = x + mixed + 0.5 * norm(layer.mlp(read), "mlp_norm")
    else:
        mixed = 0.5 * norm(mixer(norm(x, "norm")), "post_norm")
        read = x if parallel else x + mixed
        expected = x + mixed + 0.5 * norm(layer.mlp(norm(read, "mlp_norm")), "mlp_post_norm")
    torch.testing.assert_close(model(ids, context), model.norm(expected))


@pytest.mark.parametrize("kind", ["relu2", "swiglu"])
@torch.no_grad()
def test_factors_of_an_mlp(kind):
    section = MLPSection(type=kind, d_ff=24, bias=True)
    plain, scaled = (MLP(s, 16) for s in (section, section.model_copy(update=FACTORS)))
    for parameter in scaled.parameters():
        parameter.normal_()
    plain.load_state_dict(scaled.state_dict())
    x, before = torch.randn(2, 5, 16), scaled(torch.zeros(2, 5, 16))
    gate = slice(0, 24)  # all of it where there is no gate
    plain.w_in.weight[gate] *= 0.5
    plain.w_in.bias[gate] *= 0.5
    torch.testing.assert_close(scaled(x), 3.0 * plain(x))
    assert not torch.equal(before, plain(torch.zeros(2, 5, 16)))


@torch.no_grad()
def test_the_factor_of_the_logits_comes_before_their_cap():
    plain, scaled = (build(config(logit_softcap=2.0, logit_multiplier=factor)) for factor in (1.0, 8.0))
    ids = torch.arange(12).view(1, 12)
    uncapped = 2 * torch.atanh(CausalLM(plain).logits(ids) / 2)
    torch.testing.assert_close(CausalLM(scaled).logits(ids), 2 * torch.tanh(8 * uncapped / 2), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("block", "model", "message"),
    [
        ({"mlp": None, "parallel": True}, {}, "parallel: needs an mlp beside the mixer"),
        ({"position": {"type": "rotary", "fraction": 0.4}}, {}, "position.fraction: rotates 3 of 8 channels of a head"),
        ({"head_dim": 4, "position": {"type": "rotary", "fraction": 0.1}}, {}, "rotates 0 of 4 channels of a head"),
        ({"position": {"type": "rotary", "fraction": 1.5}}, {}, "less than or equal to 1"),
        ({"residual_multiplier": 0.0}, {}, "greater than 0"),
        (
            {
                "position": {
                    "type": "rotary",
                    "theta": 1.0,
                    "scaling": {"type": "yarn", "factor": 2.0, "original_max_seq_len": 8},
                }
            },
            {},
            "YaRN needs pairs that turn at different frequencies",
        ),
        (
            {},
            {"blocks": {"x": ATTENTION, "s": SHARED | {"parallel": True}}, "layers": "s+x"},
            "adds nothing to the residual",
        ),
        (
            {},
            {"blocks": {"x": ATTENTION, "s": SHARED}, "layers": "s+x", "norm": {"place": "both"}},
            "norm.place: shared block s has its norms before attention and MLP",
        ),
    ],
)
def test_what_does_not_go_together(block, model, message):
    with pytest.raises(ValidationError, match=message):
        config(block, **model)


def test_it_is_described_and_its_memory_estimated():
    plain, wired = (
        config(block, norm=norm).blocks["x"]
        for block, norm in (({}, {}), ({"parallel": True, "residual_multiplier": 0.5}, {"place": "both"}))
    )
    norms = NormConfig(place="both")
    assert wired.describe_wiring(16, norms) == "; relu2 MLP 24; parallel; norms on both sides; residual x 0.5"
    assert plain.describe_wiring(16, NormConfig()) == "; relu2 MLP 24"
    more = wired.saved_by_layer(16, 2, norms).everything - plain.saved_by_layer(16, 2, NormConfig()).everything
    assert more == 2 * 16 * 2  # the inputs of two norms more, in bf16
    window = {"sliding_window": 5, "softcap": 9.0, "qk_norm": "head", "position": {"type": "rotary", "fraction": 0.5}}
    assert config(window).blocks["x"].describe(16) == (
        "attention: 2 heads x 8, rotary of 4, window 5, softcap 9, qk norm per head"
    )
