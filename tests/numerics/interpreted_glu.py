"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.glu import reference
from llmtrain.kernels.glu.triton import BLOCK, glu, glu_bwd

ACTIVATIONS = sorted(reference.ACTIVATIONS)


def drawn(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(shape[-1])
    h = 3 * torch.randn(*shape[:-1], 2 * shape[-1], generator=g)
    return torch.randn(shape, generator=g).to(dtype), h.to(dtype)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("shape", [(1, 1), (3, 40), (2, 5, BLOCK), (2, BLOCK + 8)])
def test_the_gradient_is_that_of_the_reference(shape, activation):
    dy, h = drawn(shape)
    expected = reference.glu_bwd(dy.double(), h.double(), activation)
    found = glu_bwd(dy, h, activation)
    assert found.is_contiguous()
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_large_numbers_have_finite_gradients(activation):
    h = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4, 1.0, 1.0, 1.0, 1.0, 1.0]])
    found = glu_bwd(torch.ones(1, 5), h, activation)
    expected = reference.glu_bwd(torch.ones(1, 5), h, activation)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_the_result_is_that_of_the_reference_and_its_gradient_follows_it():
    dy, h = drawn((4, 24))
    mine, theirs = h.clone().requires_grad_(), h.clone().requires_grad_()
    y, expected = glu(mine, "silu"), reference.glu(theirs, "silu")
    assert torch.equal(y, expected)
    y.backward(dy)
    expected.backward(dy)
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-5, atol=1e-5)


def test_compiled_without_a_graph_break():
    dy, h = drawn((4, 24))
    w = torch.eye(48)

    def gradients(function):
        leaf = h.clone().requires_grad_()
        function(leaf).backward(dy)
        return leaf.grad

    compiled = torch.compile(lambda x: glu(x @ w, "gelu"), backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(gradients(compiled), gradients(lambda x: reference.glu(x @ w, "gelu")))


def test_rows_with_gaps_and_none():
    dy, h = drawn((6, 32))
    wide = torch.zeros(6, 100)
    wide[:, 10:74] = h
    assert torch.equal(glu_bwd(dy, wide[:, 10:74], "gelu"), glu_bwd(dy, h, "gelu"))
    assert glu_bwd(dy[:0], h[:0], "gelu").shape == (0, 64)


def test_the_operator_is_whole():
    dy, h = drawn((4, 16))
    torch.library.opcheck(glu_bwd, (dy, h, "silu"))
