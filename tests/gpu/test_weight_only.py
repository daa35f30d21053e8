"""Products with weights in 8 bits as they are compiled, and models that decode by them."""

import pytest
import torch

from llmtrain.adapt.stored_weights import encoded, store_in_8_bits
from llmtrain.generate.engine import Engine, Request
from llmtrain.generate.sampling import Sampling
from llmtrain.kernels.platform import detect, float8_format, float8_refusal
from llmtrain.kernels.weight_only import reference
from llmtrain.kernels.weight_only.triton import weight_only_linear
from tests.support.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="a GPU")


def formats() -> list[torch.dtype]:
    if not torch.cuda.is_available() or float8_refusal(detect()) is not None:
        return [torch.int8]
    return [torch.int8, getattr(torch, float8_format(detect()))]


@pytest.mark.parametrize("size", [(2048, 2048), (16384, 2048), (2048, 8192), (1030, 2000), (17, 40)])
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", formats())
def test_the_product_is_that_of_the_reference(kind, dtype, rows, size):
    generator = torch.Generator("cuda").manual_seed(rows)
    weight = torch.randn(size, device="cuda", generator=generator) * 0.02
    x = torch.randn(rows, size[1], device="cuda", generator=generator).to(dtype)
    codes, scales, _ = encoded(weight, kind)
    found = weight_only_linear(x, codes, scales)
    expected = reference.weight_only_linear(x.double(), codes, scales.double())
    magnitude = x.double().abs() @ (codes.double().abs() * scales.double()[:, None]).T
    bound = 2e-6 * magnitude + torch.finfo(dtype).eps * expected.abs()
    assert found.dtype == dtype and bool(((found.double() - expected).abs() <= bound).all())


@pytest.mark.parametrize("kind", ["int8", "float8"])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_model_decodes_in_graphs_what_it_decodes_without_the_kernel(kind, rows):
    here = detect()
    answers = []
    for kernel in (True, False):
        model = build("zamba2 as the 1.2B", here, device="cuda")
        store_in_8_bits(model.hybrid, kind, here)
        for module in model.modules():
            if not kernel and "few_rows" in vars(module):
                vars(module)["few_rows"] = None
        requests = [Request([5, 6, 7 + at], 12, Sampling(temperature=0)) for at in range(rows)]
        answers.append(Engine(model, rows=rows, max_len=32).run(requests))
    for one, other in zip(*answers, strict=True):
        scores = [[token.log_likelihood for token in found.tokens[:4]] for found in (one, other)]
        assert scores[0] == pytest.approx(scores[1], abs=2e-3)
