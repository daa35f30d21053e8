"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from typing import Any

import pytest
import torch

from llmtrain.adapt.float8 import experts_kernel
from llmtrain.kernels.experts import float8, triton_float8
from llmtrain.kernels.experts.reference import ReferenceExperts, Rows
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.experts.triton import TritonExperts, experts_forward
from llmtrain.kernels.experts.triton_float8 import float8_experts_forward
from llmtrain.kernels.platform import cpu


def drawn(spec: ExpertsSpec, tokens: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(tokens)
    made = [
        torch.randn(shape, generator=g) for shape in ((tokens, spec.d_model), (spec.n_experts, spec.d_in, spec.d_model))
    ]
    made.append(torch.randn(spec.n_experts, spec.d_model, spec.d_ff, generator=g))
    made.append(torch.rand(tokens, spec.top_k, generator=g))
    made.append(torch.randn(tokens, spec.d_model, generator=g))
    x, w_in, w_out, weights, up = (t.to(dtype) for t in made)
    return [x, weights.float(), w_in / 4, w_out / 4, up]


def chosen_of(spec: ExpertsSpec, tokens: int, kind: str) -> torch.Tensor:
    g = torch.Generator().manual_seed(7)
    if kind == "spread":
        return torch.rand(tokens, spec.n_experts, generator=g).topk(spec.top_k).indices
    first = spec.n_experts - spec.top_k if kind == "last" else 0  # all tokens to the same experts, none to the others
    return torch.arange(first, first + spec.top_k).expand(tokens, -1)


def compare(spec: ExpertsSpec, tokens: int, kind: str, bound: float = 1e-5) -> None:
    *inputs, up = drawn(spec, tokens)
    chosen, found = chosen_of(spec, tokens, kind), []
    for kernel, dtype in ((TritonExperts(spec), torch.float32), (ReferenceExperts(spec), torch.float64)):
        x, weights, w_in, w_out = (t.to(dtype).requires_grad_() for t in inputs)
        y = kernel(x, chosen, weights, w_in, w_out)
        found.append([y, *torch.autograd.grad(y, (x, weights, w_in, w_out), up.to(dtype))])
    for one, exact in zip(*found, strict=True):
        assert float((one.double() - exact).norm()) <= bound * max(float(exact.norm()), 1e-30)


CI = pytest.mark.ci
ACTIVATIONS = [
    "swiglu",
    "relu2",
    *(pytest.param(name, marks=CI) for name in ("geglu", "geglu_tanh", "gelu", "gelu_tanh")),
]
SIZES = [((33, 7, 5, 2), 40), ((16, 35, 6, 1), 5), ((40, 16, 4, 4), 33), ((8, 8, 9, 3), 1)]


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_products_and_gradients_are_the_references(activation):
    compare(ExpertsSpec(24, 40, 3, 2, activation, dtype="float32"), 21, "spread")


@pytest.mark.parametrize(
    ("kind", "sizes", "tokens"),
    [
        pytest.param(kind, *one, marks=[] if (i, kind) in ((0, "spread"), (1, "last")) else CI)
        for i, one in enumerate(SIZES)
        for kind in ("spread", "first", "last")
    ],
)
def test_odd_sizes_and_experts_without_tokens(sizes, tokens, kind):
    compare(ExpertsSpec(*sizes, dtype="float32"), tokens, kind)


def cast_by_torch(
    x: torch.Tensor, dims: tuple[int, ...], dtype: torch.dtype, rowwise: bool, transposed: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = float8.scales_of(x, dims, dtype, rowwise)
    found = (float8.rounded(x, dims, dtype, rowwise) / scale).to(dtype)
    return (found.mT if transposed else found).contiguous(), scale


@pytest.mark.parametrize("dims", [(2,), (1,), (1, 2)])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_casts_are_those_of_torch(dims, transposed, dtype):
    """Of numbers that the format has at every scale of a power of 2: the interpreter loses carries where it rounds."""
    x = (torch.randint(-7, 8, (3, 37, 70), generator=torch.Generator().manual_seed(3)) / 4).bfloat16()
    found, scale = triton_float8.cast(x, dims, dtype, True, transposed)
    expected, by = cast_by_torch(x, dims, dtype, True, transposed)
    assert torch.equal(scale, by) and torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    assert found.shape == (x.mT if transposed else x).shape and found.is_contiguous()


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize(
    ("sizes", "tokens", "kind", "activation"),
    [
        ((32, 48, 5, 2), 37, "spread", "swiglu"),
        ((64, 16, 4, 1), 19, "last", "relu2"),
        pytest.param((16, 80, 9, 3), 8, "first", "swiglu", marks=CI),
        pytest.param((48, 32, 6, 2), 70, "first", "gelu", marks=CI),
    ],
)
def test_in_float8_the_error_is_that_of_the_emulation(monkeypatch, recipe, sizes, tokens, kind, activation):
    """Rows of experts in any number, none too; rows and channels of very different magnitudes."""
    monkeypatch.setattr(triton_float8, "cast", cast_by_torch)
    spec = ExpertsSpec(*sizes, activation=activation, dtype="float32")
    *inputs, up = drawn(spec, tokens)
    if recipe == "rowwise":
        inputs[0] *= 10.0 ** (torch.arange(tokens) % 5 - 2)[:, None]
        inputs[2] *= 2.0 ** (torch.arange(spec.d_in) % 3)[:, None]
    chosen, found = chosen_of(spec, tokens, kind), []
    kernels: list[Any] = [experts_kernel(spec, cpu(), recipe, emulate) for emulate in (False, True)]
    exact_one: Any = ReferenceExperts(spec)
    for kernel, dtype in ((exact_one, torch.float64), *((one, torch.float32) for one in kernels)):
        x, weights, w_in, w_out = (t.to(dtype).requires_grad_() for t in inputs)
        y = kernel(x, chosen, weights, w_in, w_out)
        found.append([y.detach(), *torch.autograd.grad(y, (x, weights, w_in, w_out), up.to(dtype))])
    for exact, one, emulated in zip(*found, strict=True):
        error, allowed = (float((other.double() - exact).norm() / exact.norm()) for other in (one, emulated))
        # The emulation computes the gradients of the rows' weights from outputs alone.
        least = 0.04 if recipe == "rowwise" else 0.1
        assert 1e-4 < error <= max(1.3 * allowed, least) and allowed < 0.2, (error, allowed)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_what_is_not_finite_is_not_in_float8_either(recipe, bad):
    spec = ExpertsSpec(32, 16, 3, 1, dtype="float32")
    x, weights, w_in, w_out, _ = drawn(spec, 6)
    x[2, 3] = bad
    for emulate in (False, True):
        y = experts_kernel(spec, cpu(), recipe, emulate)(x, chosen_of(spec, 6, "spread"), weights, w_in, w_out)
        assert y[2].isnan().all() and y[3].isfinite().all() == (recipe == "rowwise")


@pytest.mark.parametrize("make", [TritonExperts, lambda spec: experts_kernel(spec, cpu(), "rowwise", False)])
def test_no_tokens_at_all(make):
    spec = ExpertsSpec(16, 16, 3, 2, dtype="float32")
    x, weights, w_in, w_out, _ = drawn(spec, 0)
    inputs = [t.requires_grad_() for t in (x, weights, w_in, w_out)]
    y = make(spec)(inputs[0], torch.empty(0, 2, dtype=torch.int64), *inputs[1:])
    gradients = torch.autograd.grad(y.sum(), inputs)
    assert y.shape == (0, 16) and not gradients[2].any() and not gradients[3].any()


def test_compiled_without_a_graph_break_and_whole_as_an_operator():
    spec = ExpertsSpec(8, 8, 3, 2, dtype="float32")
    x, weights, w_in, w_out, _ = drawn(spec, 6)
    rows = Rows.of(chosen_of(spec, 6, "spread"), 3)
    arguments = (x, rows.order.int(), rows.ends, weights, w_in, w_out, "swiglu")
    torch.library.opcheck(experts_forward, arguments)
    kinds = (False, torch.float8_e4m3fn, torch.float8_e5m2)
    torch.library.opcheck(float8_experts_forward, (*arguments, *kinds), rtol=0.1, atol=0.1)
    kernel, chosen = TritonExperts(spec), chosen_of(spec, 6, "spread")

    def run(x: torch.Tensor) -> torch.Tensor:
        return kernel(2 * x, chosen, weights, w_in, w_out)

    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))
