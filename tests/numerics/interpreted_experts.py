"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.experts.reference import ReferenceExperts, Rows
from llmtrain.kernels.experts.spec import ExpertsSpec
from llmtrain.kernels.experts.triton import TritonExperts, experts_forward


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


def test_no_tokens_at_all():
    spec = ExpertsSpec(8, 8, 3, 2, dtype="float32")
    x, weights, w_in, w_out, _ = drawn(spec, 0)
    inputs = [t.requires_grad_() for t in (x, weights, w_in, w_out)]
    y = TritonExperts(spec)(inputs[0], torch.empty(0, 2, dtype=torch.int64), *inputs[1:])
    gradients = torch.autograd.grad(y.sum(), inputs)
    assert y.shape == (0, 8) and not gradients[2].any() and not gradients[3].any()


def test_compiled_without_a_graph_break_and_whole_as_an_operator():
    spec = ExpertsSpec(8, 8, 3, 2, dtype="float32")
    x, weights, w_in, w_out, _ = drawn(spec, 6)
    rows = Rows.of(chosen_of(spec, 6, "spread"), 3)
    arguments = (x, rows.order.int(), rows.ends, weights, w_in, w_out, "swiglu")
    torch.library.opcheck(experts_forward, arguments)
    kernel, chosen = TritonExperts(spec), chosen_of(spec, 6, "spread")

    def run(x: torch.Tensor) -> torch.Tensor:
        return kernel(2 * x, chosen, weights, w_in, w_out)

    torch.testing.assert_close(torch.compile(run, backend="aot_eager", fullgraph=True)(x), run(x))
