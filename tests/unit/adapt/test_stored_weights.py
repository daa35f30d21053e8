"""Weights in 8 bits for inference: their codes, their products, and models of every kind of layer that have them."""

from typing import Any

import pytest
import torch
from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

from llmtrain.adapt.adapters import adapted_class
from llmtrain.adapt.base import adaptations, adapted
from llmtrain.adapt.nf4 import linear_layers, store
from llmtrain.adapt.stored_weights import EightBitLinear, encoded, store_in_8_bits
from llmtrain.errors import UserError
from llmtrain.generate.engine import Engine, Request
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels.platform import Platform, cpu, float8_format
from llmtrain.models.causal_lm import CausalLM
from llmtrain.models.hybrid import HybridLM
from llmtrain.models.layers import Linear
from llmtrain.schema.adapt import AdaptConfig, LoraConfig, WeightFormat
from tests.support.models import MODELS, build

OFTEN = (
    "zamba2 as the 1.2B",
    "latent attention with positions and without",
    "mamba3 with groups and all channels turning",
)
INT8, E4M3, FNUZ = torch.int8, torch.float8_e4m3fn, torch.float8_e4m3fnuz


def layer(
    kind: torch.dtype, d_in: int, d_out: int, dtype: torch.dtype, bias: bool = False
) -> tuple[Linear, torch.Tensor]:
    """A linear layer in 8 bits, and the weight that it had."""
    generator = torch.Generator().manual_seed(d_in)
    linear = Linear(d_in, d_out, bias=bias).requires_grad_(False)
    # Rows of very different sizes, one of zeros.
    sizes = torch.logspace(-3, 2, d_out)[:, None]
    weight = (torch.randn(d_out, d_in, generator=generator) * sizes).index_fill(0, torch.tensor([1]), 0.0).to(dtype)
    if bias:
        linear.bias.copy_(torch.randn(d_out, generator=generator))
    store(linear.to(dtype), EightBitLinear, encoded(weight, kind))
    return linear, weight


@pytest.mark.parametrize("kind", [INT8, E4M3, FNUZ])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 9])
def test_a_product_is_within_the_formats_bound(kind, dtype, rows):
    linear, weight = layer(kind, 40, 12, dtype, bias=True)
    x = torch.randn(2, rows, 40, generator=torch.Generator().manual_seed(rows)).to(dtype)
    exact = x.double() @ weight.double().T + linear.bias.double()
    largest = weight.double().abs().amax(1, keepdim=True)
    # Half a step of int8. Of e4m3 half a unit of 3 bits, and among subnormal numbers half of the least, of which the largest is
    # 448 * 2^9, and 240 * 2^10 without negative zero.
    error = {
        INT8: largest / 127 / 2 + 0 * weight.double(),
        E4M3: weight.double().abs() * 2**-4 + largest / (448 * 2**10),
        FNUZ: weight.double().abs() * 2**-4 + largest / (240 * 2**11),
    }[kind]
    rounding = torch.finfo(dtype).eps * (
        x.double().abs() @ (weight.double().abs() + error).T + linear.bias.double().abs()
    )
    bound = x.double().abs() @ error.T * 1.0001 + 2 * rounding
    found = (linear(x).double() - exact).abs()
    assert linear(x).dtype == dtype and bool((found <= bound).all())
    assert float((found / bound.clamp(min=1e-30)).max()) > 0.05, "the bound says something"


@pytest.mark.parametrize("kind", [INT8, E4M3, FNUZ])
def test_scales_are_exact_and_encoding_again_changes_nothing(kind):
    linear, weight = layer(kind, 40, 12, torch.float32)
    largest = 127 if kind == INT8 else torch.finfo(kind).max
    assert isinstance(linear, EightBitLinear)
    codes, scales, _ = linear.stored
    assert scales.dtype == torch.float32 and torch.equal(scales[2:], weight.abs().amax(1)[2:] / largest)
    assert torch.equal(codes.float().abs().amax(1)[2:], torch.full((10,), float(largest)))
    assert not bool(linear.weight[1].any()), "zeros stay zeros"
    again = encoded(linear.weight, kind)
    assert torch.equal(again.codes.float(), codes.float())
    torch.testing.assert_close(again.scales, scales, rtol=2e-7, atol=0)


@pytest.mark.parametrize(("kind", "config"), [(INT8, Int8WeightOnlyConfig()), (E4M3, Float8WeightOnlyConfig())])
def test_weights_are_as_near_as_torchaos(kind, config):
    theirs = torch.nn.Linear(64, 24, bias=False)
    weight = theirs.weight.detach().clone()
    ours = encoded(weight, kind)
    quantize_(holder := torch.nn.Sequential(theirs), config)
    other: Any = holder[0].weight
    # A row's largest number is 127.5 to torchao.
    torch.testing.assert_close(ours.scales, other.scale.flatten().float(), rtol=5e-3 if kind == INT8 else 1e-6, atol=0)
    assert float((ours.codes.float() - other.qdata.float()).abs().max()) <= (1 if kind == INT8 else 0)
    errors = [(one - weight).square().mean() for one in (ours.codes.float() * ours.scales[:, None], other.dequantize())]
    assert errors[0] <= errors[1] * 1.02


def test_the_format_of_float8_is_the_devices():
    assert float8_format(Platform("amd", "gfx942", "", 0)) == "float8_e4m3fnuz"
    assert float8_format(Platform("amd", "gfx950", "", 0)) == "float8_e4m3fn"
    assert float8_format(Platform("nvidia", "sm90", "", 0)) == "float8_e4m3fn"
    assert float8_format(cpu()) == "float8_e4m3fn"


def with_widened_weights(model: CausalLM, name: str, kind: WeightFormat) -> CausalLM:
    """The model whose weights are what the codes of `model` stand for."""
    plain = build(name, cpu())
    for ours, other in zip(linear_layers(model.hybrid), linear_layers(plain.hybrid), strict=True):
        if isinstance(ours, EightBitLinear):
            assert not torch.equal(ours.weight, other.weight)
            other.weight = torch.nn.Parameter(ours.weight)
    return plain


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=() if kind == "int8" and name in OFTEN else pytest.mark.ci)
        for name in MODELS
        for kind in ("int8", "float8")
    ],
)
def test_every_kind_of_layer_computes_what_its_codes_stand_for(name, kind):
    model, before = build(name, cpu()), build(name, cpu())
    kept = {name for name, _ in model.hybrid.named_parameters()}
    store_in_8_bits(model.hybrid, kind, cpu())
    plain = with_widened_weights(model, name, kind)
    stored = [module for module in model.modules() if isinstance(module, EightBitLinear)]
    assert len(stored) >= len(model.hybrid.blocks)
    left = dict(model.hybrid.named_parameters())
    assert {"embed.weight", "norm.weight"} <= {*left} < kept
    assert torch.equal(left["embed.weight"], before.hybrid.embed.weight)
    ids = torch.randint(97, (2, 11), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        found, expected, exact = (one.logits(ids) for one in (model, plain, before))
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert not torch.allclose(found, exact, atol=2e-4, rtol=1e-4), "the weights are the same as before"
    requests = [[Request([5, 6, 7 + at], 6, Sampling(temperature=0)) for at in range(3)] for _ in range(3)]
    for made, of in zip(requests, (model, model, plain), strict=True):
        Engine(of, rows=3, max_len=16).run(made)
    again, first, widened = ([one.ids for one in made] for made in requests)
    assert again == first == widened


def test_weights_take_about_half_the_memory(caplog):
    config = build("zamba2 as the 1.2B", cpu()).config.model_copy(update={"d_model": 256})
    with torch.device("meta"):
        hybrid = HybridLM(config, cpu(), dtype=torch.bfloat16)
    hybrid.to_empty(device="cpu").init_weights(1)
    hybrid.cast(torch.bfloat16)
    linears = [linear.weight.nbytes for linear in linear_layers(hybrid)]
    rest = sum(one.nbytes for one in hybrid.parameters()) - sum(linears)
    with caplog.at_level("INFO", logger="llmtrain"):
        store_in_8_bits(hybrid, "int8", cpu())
    stored = sum(module.stored.nbytes for module in hybrid.modules() if isinstance(module, EightBitLinear))
    assert sum(one.nbytes for one in hybrid.parameters()) == rest
    assert 0.5 < stored / sum(linears) < 0.52
    assert f"{sum(linears) / 2**20:.1f} MiB of linear layers are {stored / 2**20:.1f}" in caplog.text


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_stay_as_they_are_beside_stored_weights(dora):
    adapt = AdaptConfig(lora=LoraConfig(rank=2, dora=dora))
    config = build("zamba2 as the 1.2B", cpu()).config
    with torch.device("meta"):
        model = adapted(HybridLM(config, cpu()), adapt)
    model.to_empty(device="cpu")
    model.init_weights(1)
    for converter in adaptations(adapt):
        converter.begin(model)
    ids = torch.randint(97, (1, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".up." in name:
                parameter.normal_(std=0.5, generator=torch.Generator().manual_seed(1))
        store_in_8_bits(model, "int8", cpu())
        found = CausalLM(model).logits(ids)
        for linear in list(linear_layers(model)):
            weight = linear.weight
            del linear.stored
            linear.__class__ = adapted_class(Linear) if hasattr(linear, "lora") else Linear
            linear.weight = torch.nn.Parameter(weight)
        torch.testing.assert_close(found, CausalLM(model).logits(ids), atol=2e-4, rtol=1e-4)


def test_rejects_weights_in_4_bits_and_those_that_are_not_finite():
    model = build("llama with grouped queries", cpu()).hybrid
    with torch.no_grad():
        next(linear_layers(model)).weight[0, 0] = torch.nan
    with pytest.raises(UserError, match=r"--weights int8: a weight of shape .* is not finite"):
        store_in_8_bits(model, "int8", cpu())
    frozen = build("llama with grouped queries", cpu()).hybrid.requires_grad_(False)
    for converter in adaptations(AdaptConfig(lora=None, base="nf4")):
        converter.finish(frozen, torch.device("cpu"))
    with pytest.raises(UserError, match="in 4 bits already"):
        store_in_8_bits(frozen, "float8", cpu())
