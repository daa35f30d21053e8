"""The linear layers that compute in float8, and the reasons of the others."""

from typing import Any

import pytest
import torch

from llmtrain.adapt.float8 import Float8
from llmtrain.errors import UserError
from llmtrain.kernels.platform import Platform, cpu, float8_refusal
from llmtrain.models.config import ModelConfig
from llmtrain.models.float8_products import exclude_problems, float8_experts, float8_products
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.float8 import Float8Config
from llmtrain.schema.load import load_config
from tests.support import experts


def model_of(d_model: int, blocks: dict[str, Any], layers: str) -> HybridLM:
    config = {"vocab_size": 512, "d_model": d_model, "max_seq_len": 64, "blocks": blocks, "layers": layers}
    with torch.device("meta"):
        return HybridLM(ModelConfig.model_validate({**config, "tie_embeddings": False}), cpu())


MAMBA = {"type": "mamba2", "d_state": 64, "head_dim": 64}
SHARED = {
    "type": "shared_attention",
    "n_heads": 16,
    "position": {"type": "rotary"},
    "mlp": {"type": "geglu", "d_ff": 8192},
    "adapter_rank": 128,
}


@pytest.fixture(scope="module")
def hybrid() -> HybridLM:
    return model_of(2048, {"m": MAMBA, "s": SHARED}, "m (s+m)")


def reasons(model: HybridLM, **config: Any) -> dict[str, str | None]:
    return {name: product.left_out for name, product in float8_products(model, Float8Config(**config)).items()}


def test_projections_of_mixers_and_of_shared_blocks_are_in_float8(hybrid):
    found = reasons(hybrid)
    inside = {name for name, reason in found.items() if reason is None}
    assert {"blocks.0.mixer.in_proj", "blocks.1.mixer.out_proj", "blocks.1.shared_input.linear"} <= inside
    assert {f"shared.s.0.{name}" for name in ("mixer.wqkv", "mixer.wo", "mlp.w_in", "mlp.w_out")} <= inside


def test_the_head_and_small_products_are_left_out(hybrid):
    found = reasons(hybrid)
    assert found["head"] == "the head"
    assert found["blocks.1.shared_input.mlp_adapter.down"] == "small"  # 2048 -> 128
    assert found["blocks.1.shared_input.mlp_adapter.up"] == "small"  # 128 -> 16384
    assert reasons(hybrid, small_products=True)["blocks.1.shared_input.mlp_adapter.up"] is None


def test_rowwise_scales_leave_out_more(hybrid):
    """2048 -> 2048 gains tensorwise, and loses with a scale for each row."""
    assert reasons(hybrid)["blocks.1.shared_input.linear"] is None
    assert reasons(hybrid, recipe="rowwise")["blocks.1.shared_input.linear"] == "small"


def test_widths_that_are_no_multiple_of_16_are_left_out():
    """Mamba-2 130M: 2 * 1536 + 2 * 64 + 24 heads = 3224 columns."""
    found = reasons(model_of(768, {"m": MAMBA}, "m"), small_products=True)
    assert found["blocks.0.mixer.in_proj"] == "not a multiple of 16"
    assert found["blocks.0.mixer.out_proj"] is None


def expert_reasons(model: HybridLM, **config: Any) -> dict[str, str | None]:
    return {name: one.left_out for name, one in float8_experts(model, Float8Config(**config)).items()}


def test_experts_are_in_float8_where_they_are_asked_for():
    model = HybridLM(experts.config(d_ff=32), cpu())
    assert expert_reasons(model) == dict.fromkeys(
        ("blocks.0.mlp.experts", "blocks.1.mlp.experts"), "train.float8.experts"
    )
    assert expert_reasons(model, experts=True, exclude=["blocks.1.*"]) == {
        "blocks.0.mlp.experts": None,
        "blocks.1.mlp.experts": "train.float8.exclude",
    }


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "widths that are multiples of 16, and d_ff of experts is 24"),
        ({"d_ff": 32, "bias": True}, "no biases of experts"),
        ({"d_ff": 32, "activation": "swiglu_clamped"}, "no activation swiglu_clamped"),
        ({"d_ff": 32, "latent": 24}, "d_model of experts is 24"),
    ],
)
def test_experts_that_no_kernel_serves_are_left_out(settings, reason):
    found = expert_reasons(HybridLM(experts.config(**settings), cpu()), experts=True)
    assert all(reason in (why or "") for why in found.values()) and len(found) == 2


@pytest.mark.parametrize(
    ("preset", "settings", "reason"),
    [
        ("llama3-8b", "{experts: true}", "no block has an mlp of type experts; use false"),
        ("gpt-oss-20b", "{experts: true}", "block attn: our Triton kernels have no biases of experts; use false, or"),
        ("olmoe-1b-7b", "{experts: true, exclude: ['*.7.mlp.experts']}", "its backend grouped_mm has no float8"),
        ("olmoe-1b-7b", "{experts: true, exclude: ['*.mlp.experts']}", None),
        ("olmoe-1b-7b", "{experts: true, emulate: true}", None),
    ],
)
def test_a_config_whose_experts_cannot_is_refused(preset, settings, reason):
    changes = [f"train.float8={settings}", *(["model.blocks.attn.mlp.backend=grouped_mm"] if "olmoe" in preset else [])]
    if reason is None:
        assert load_config(f"pretrain/{preset}", changes).train.float8 is not None
        return
    with pytest.raises(UserError, match=r"train\.float8\.experts") as error:
        load_config(f"pretrain/{preset}", changes)
    assert reason in str(error.value)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
@pytest.mark.parametrize("tokens", [1, 37])
def test_a_layer_with_experts_in_float8_is_close_to_that_without(recipe, tokens):
    """Any number of rows to an expert; 1 token leaves two experts without any."""
    found = []
    for float8 in (False, True):
        model = experts.build(d_ff=32, activation="swiglu", balance={"weight": 0.0}).hybrid
        if float8:
            Float8(Float8Config(recipe=recipe, experts=True, emulate=True), shards=1).convert(model, cpu())
        layer: Any = model.blocks[0].mlp
        x = torch.randn(1, tokens, 32, generator=torch.Generator().manual_seed(3), requires_grad=True)
        y = layer(x, model.context(tokens, torch.device("cpu")))
        leaves = [x, *layer.experts.parameters()]
        found.append([y.detach(), *torch.autograd.grad(y.square().sum(), leaves)])
    for exact, rounded in zip(*found, strict=True):
        error = float((rounded - exact).norm() / exact.norm())
        assert 1e-3 < error < 0.15


def test_patterns_leave_out_what_they_match(hybrid):
    found = reasons(hybrid, exclude=["blocks.0.*", "*.w_out"])
    assert found["blocks.0.mixer.in_proj"] == found["shared.s.0.mlp.w_out"] == "train.float8.exclude"
    assert found["blocks.1.mixer.in_proj"] is None


def test_a_pattern_without_a_match_is_a_problem(hybrid):
    config = Float8Config(exclude=["*.in_proj", "*.inproj"])
    [problem] = exclude_problems(config, float8_products(hybrid, config))
    assert problem.path == "train.float8.exclude.1"
    assert "shared.s.0.mixer.wqkv" in problem.message


@pytest.mark.parametrize(
    ("vendor", "arch", "has"),
    [
        ("nvidia", "sm80", False),
        ("nvidia", "sm86", False),
        ("nvidia", "sm89", True),
        ("nvidia", "sm90", True),
        ("nvidia", "sm120", True),
        ("amd", "gfx90a", False),
        ("amd", "gfx942", True),
        ("amd", "gfx950", True),
        ("amd", "gfx1100", False),
        ("amd", "gfx1201", True),
        ("cpu", "cpu", False),
    ],
)
def test_devices_without_float8_units_are_refused(vendor, arch, has):
    reason = float8_refusal(Platform(vendor, arch, "a device", 1 << 30))
    assert (reason is None) == has
