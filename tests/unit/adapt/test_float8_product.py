"""Products by our casts: the numbers that torchao's own products give, with the reference in place of the kernels."""

import dataclasses
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchao.float8 import Float8LinearConfig
from torchao.float8.float8_linear import Float8Linear
from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
from torchao.float8.float8_training_tensor import GemmInputRole

from llmtrain.adapt import float8, float8_product
from llmtrain.adapt.float8_product import CastOnceProjection, Float8Product
from llmtrain.errors import UserError
from llmtrain.kernels.float8_cast import reference
from llmtrain.kernels.platform import Platform
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.sections.float8 import Float8Config
from tests.support.tiny import tiny_config

H200 = Platform("nvidia", "sm90", "H200", 140 << 30, 132)
MI300 = Platform("amd", "gfx942", "MI300X", 190 << 30, 304)
CONFIG = dataclasses.replace(Float8LinearConfig.from_recipe_name("tensorwise"), emulate=True)


def exact_product(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, dtype: torch.dtype, **_: Any) -> Tensor:
    """The product in fp32, as torchao emulates it; the operands in the order of memory that Hopper wants."""
    assert a.stride(1) == 1 and b.stride(0) == 1
    return (a.float() / a_scale @ (b.float() / b_scale)).to(dtype)


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(float8_product, "float8_cast", reference.float8_cast)
    monkeypatch.setattr(float8_product, "float8_transpose", reference.float8_transpose)
    monkeypatch.setattr(float8_product, "addmm_float8_unwrapped", exact_product)


def passes(product: Any, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Output and gradients of input and weight."""
    x = x.detach().requires_grad_()
    output = product(x, weight)
    d_output = torch.randn(output.shape, generator=torch.Generator().manual_seed(5)).to(output.dtype)
    return [output.detach(), *torch.autograd.grad(output, (x, weight), d_output)]


@pytest.mark.parametrize("shape", [(16, 64, 48), (2, 16, 32, 80), (2, 4, 8, 96, 16)])
def test_output_and_gradients_are_those_of_torchao(shape):
    *batch, d_in, d_out = shape
    torch.manual_seed(d_in)
    linear = Float8Linear.from_float(nn.Linear(d_in, d_out, bias=False, dtype=torch.bfloat16), CONFIG)
    x = 5 * torch.randn(*batch, d_in).to(torch.bfloat16)

    def ours(x: Tensor, weight: Tensor) -> Tensor:
        found = Float8Product.apply(x, weight, linear.linear_mm_config, CONFIG)
        assert isinstance(found, Tensor)
        return found

    for found, expected in zip(
        passes(ours, x, linear.weight), passes(lambda x, _: linear(x), x, linear.weight), strict=True
    ):
        assert torch.equal(found, expected)


def test_a_weight_that_comes_in_float8_is_taken_as_it_is():
    torch.manual_seed(0)
    linear = Float8Linear.from_float(nn.Linear(32, 48, bias=False, dtype=torch.bfloat16), CONFIG)
    products = linear.linear_mm_config
    dtype = CONFIG.cast_config_weight.target_dtype
    assert dtype is not None
    gathered: Any = hp_tensor_to_float8_dynamic(
        linear.weight.detach(), dtype, products, gemm_input_role=GemmInputRole.WEIGHT
    )
    x = torch.randn(16, 32).to(torch.bfloat16)
    found: Any = Float8Product.apply(x, gathered, products, CONFIG)
    assert torch.equal(found, linear(x))


def test_layers_are_converted_for_nvidia_alone(shards, tmp_path, caplog):
    def model() -> HybridLM:
        with torch.device("meta"):
            return HybridLM(tiny_config(shards, tmp_path).model)

    config = Float8Config(casts="triton", small_products=True)
    converted = model()
    caplog.set_level("INFO", "llmtrain.run")
    float8.Float8(config, shards=1).convert(converted, H200)
    products = [module for module in converted.modules() if isinstance(module, CastOnceProjection)]
    assert caplog.messages[0].startswith(f"float8 (tensorwise): {len(products)} of ")
    assert any(type(module) is CastOnceProjection for module in converted.modules())
    other = model()
    float8.Float8(config.model_copy(update={"casts": "compiled"}), shards=1).convert(other, H200)
    assert not any(type(module) is CastOnceProjection for module in other.modules())
    with pytest.raises(UserError, match=r"train\.float8\.casts = triton: .* NVIDIA's GPUs; use compiled"):
        float8.Float8(config, shards=1).convert(model(), MI300)


@pytest.mark.parametrize(
    ("config", "platform", "ours"),
    [
        (Float8Config(), H200, True),
        (Float8Config(), MI300, False),
        (Float8Config(), replace(H200, arch="sm89"), False),
        (Float8Config(recipe="rowwise"), H200, False),
        (Float8Config(emulate=True), H200, False),
        (Float8Config(casts="compiled"), H200, False),
        (Float8Config(casts="triton"), replace(H200, arch="sm89"), True),
    ],
    ids=str,
)
def test_auto_takes_our_casts_where_they_were_measured(config, platform, ours):
    assert float8.casts_by_triton(config, platform) == ours


@pytest.mark.parametrize("more", [{"recipe": "rowwise"}, {"emulate": True}])
def test_what_the_kernels_do_not_serve_is_refused(more):
    [problem] = Float8Config.model_construct(**{**Float8Config().model_dump(), "casts": "triton", **more}).problems()
    assert problem.path == "casts" and "use compiled" in problem.message
