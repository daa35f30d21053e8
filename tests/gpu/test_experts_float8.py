"""Experts in float8 as they are compiled: casts bit by bit those of PyTorch, layers as far from fp64 as the emulation."""

from typing import Any

import pytest
import torch

from llmtrain.adapt.float8 import experts_kernel
from llmtrain.kernels.experts.float8 import Float8Formats, rounded
from llmtrain.kernels.experts.reference import ReferenceExperts
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.platform import detect, float8_refusal

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or float8_refusal(detect()) is not None, reason="a GPU with float8 units"
)


@pytest.mark.parametrize("shape", [(1, 1000, 528), (3, 48, 208), (8, 1024, 2048)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dims", "rowwise"), [((2,), True), ((1,), True), ((1, 2), False)])
def test_casts_are_those_of_torch(shape, transposed, dims, rowwise):
    from llmtrain.kernels.experts.triton_float8 import cast

    x = (torch.randn(shape, device="cuda") * torch.rand(shape[2], device="cuda")).bfloat16()
    formats = Float8Formats.of("tensorwise", detect())
    for dtype in (formats.forward, formats.gradient):
        found, scale = cast(x, dims, dtype, rowwise, transposed)
        expected = rounded(x, dims, dtype, rowwise)
        apart = (found.float() * (scale.mT if transposed else scale) - (expected.mT if transposed else expected)).abs()
        assert float((apart > 0).float().mean()) < 1e-3  # a quotient on the middle between two numbers
        assert found.is_contiguous() and found.shape == (x.mT if transposed else x).shape


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("kind", ["spread", "first", "skewed"])
@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_layers_are_as_close_as_the_emulation(recipe, kind, activation):
    """Any number of rows to an expert, none too."""
    spec, tokens = ExpertsSpec(512, 272, 12, 3, activation), 1001
    g = torch.Generator("cuda").manual_seed(5)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device="cuda")

    logits = draw(tokens, spec.n_experts) + (4 * draw(spec.n_experts) if kind == "skewed" else 0)
    chosen = logits.topk(spec.top_k).indices
    if kind == "first":
        chosen = torch.arange(spec.top_k, device="cuda").expand(tokens, -1)
    weights, x, up = torch.rand(tokens, spec.top_k, generator=g, device="cuda"), draw(tokens, 512), draw(tokens, 512)
    w_in, w_out = draw(spec.n_experts, spec.d_in, 512) / 512**0.5, draw(spec.n_experts, 512, 272) / 272**0.5
    plain: Any = ReferenceExperts(spec)
    found = []
    for kernel, dtype in (
        (plain, torch.float64),
        *((experts_kernel(spec, detect(), recipe, emulate), torch.bfloat16) for emulate in (False, True)),
    ):
        leaves = [t.to(dtype).requires_grad_() for t in (x, w_in, w_out)]
        factors = (weights if dtype == torch.bfloat16 else weights.double()).clone().requires_grad_()
        y = kernel(leaves[0], chosen, factors, *leaves[1:])
        found.append([y.detach(), *torch.autograd.grad(y, (*leaves, factors), up.to(dtype))])
    for exact, one, emulated in zip(*found, strict=True):
        error, allowed = (float((other.double() - exact).norm() / exact.norm()) for other in (one, emulated))
        assert error <= max(1.3 * allowed, 0.04 if recipe == "rowwise" else 0.1) and allowed < 0.2, (error, allowed)


def test_a_graph_holds_a_layer_and_does_not_wait_for_the_host():
    spec = ExpertsSpec(256, 128, 8, 2)
    kernel = experts_kernel(spec, detect(), "rowwise", False)
    x = torch.randn(512, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_in = torch.randn(8, 256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w_out = torch.randn(8, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    chosen = torch.rand(512, 8, device="cuda").topk(2).indices
    weights = torch.rand(512, 2, device="cuda", requires_grad=True)

    def step() -> tuple[torch.Tensor, ...]:
        y = kernel(x, chosen, weights, w_in, w_out)
        return y.detach(), *torch.autograd.grad(y.sum(), (x, weights, w_in, w_out))

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        expected = [step() for _ in range(3)][-1]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    graph.replay()
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
