"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from typing import Any, Literal

import pytest
import torch

from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.norm.triton import TritonNorm, norm_backward, norm_forward
from llmtrain.kernels.operation import leaves, wide
from llmtrain.kernels.row_tiles import Launch, Tile
from tests.support import kernels as support

TYPES = pytest.mark.parametrize("type_, biased", [("rmsnorm", False), ("layernorm", False), ("layernorm", True)])


def made(
    dim: int, type_: Literal["rmsnorm", "layernorm"], biased: bool, columns: int = 16, rows: int = 1, run: int = 2,
    **how: Any,
) -> TritonNorm:  # fmt: skip
    """Several parts, tiles and programs in a small problem. how: of the backward."""
    launch = Launch(Tile(columns, 1, run, rows), Tile(columns, 1, run, rows, **how), num_sms=None)
    return TritonNorm(NormSpec(dim, type_, biased, 1e-5, "float32"), launch)


def assert_agrees(kernel: TritonNorm, tensors: list[Any], at: slice = slice(None)) -> None:
    """at: of the sum and its norm, what is used."""

    def used(norm: Any) -> Any:
        return lambda *t: norm(*t)[at]

    ours = support.outcome(used(kernel), tensors)
    support.assert_agrees(ours, support.outcome(used(ReferenceNorm(kernel.spec)), tensors, torch.float64))
    assert all(t.dtype == torch.float32 for t in ours)


@TYPES
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dim", [48, 40, 7])
@pytest.mark.parametrize("columns, rows, run", [(16, 1, 2), (32, 4, 1), (64, 2, 4)])
def test_agrees_with_the_reference(dim, type_, biased, summed, columns, rows, run):
    tensors = support.residual_inputs((3, 5), dim, summed, biased, torch.float32)
    assert_agrees(made(dim, type_, biased, columns, rows, run), tensors)


@TYPES
def test_the_norm_alone_and_the_sum_with_its_norm_unused(type_, biased):
    kernel, tensors = made(40, type_, biased), support.residual_inputs((2, 4), 40, True, biased, torch.float32)
    assert_agrees(kernel, tensors, slice(1, None))
    x, delta, weight, bias = tensors
    x, delta = (t.clone().requires_grad_() for t in (x, delta))
    kernel(x, delta, weight, bias)[0].sum().backward()
    assert x.grad is not None and delta.grad is not None
    assert x.grad.unique() == delta.grad.unique() == 1


@TYPES
def test_when_rows_are_read_changes_no_bit(type_, biased):
    tensors = support.residual_inputs((2, 4), 40, True, biased, torch.float32)
    support.assert_equal(*(support.outcome(made(40, type_, biased, prefetch=a), tensors) for a in (False, True)))


@TYPES
def test_one_token_and_strides_of_every_kind(type_, biased):
    kernel = made(20, type_, biased)
    assert_agrees(kernel, support.residual_inputs((1, 1), 20, True, biased, torch.float32))
    x, delta, *weights = support.residual_inputs((2, 6), 20, True, biased, torch.float32)
    assert_agrees(kernel, [x.transpose(0, 1), delta.transpose(0, 1).contiguous(), *weights])
    assert_agrees(kernel, [x[:, ::2], delta[:1, :3].expand(2, -1, -1), *weights])


@TYPES
def test_rows_whose_mean_is_large_and_rows_without_variance(type_, biased):
    """The variance is that of what is left when the mean is gone."""
    kernel = made(20, type_, biased)
    x, _, *weights = support.residual_inputs((2, 6), 20, False, biased, torch.float32)
    given: list[Any] = [x + 500, None, *weights]
    exact = ReferenceNorm(kernel.spec)(*wide(given))
    for found, right in zip(kernel(*given), exact, strict=True):
        torch.testing.assert_close(found.double(), right, atol=1e-3, rtol=1e-4)
    constant = torch.ones_like(x)
    assert_agrees(kernel, [constant, -constant, *weights])


def test_gradients_have_their_tensors_dtypes_and_the_norm_is_of_the_unrounded_sum():
    x, delta, weight, bias = support.residual_inputs((2, 3), 20, True, True, torch.float32)
    tensors = [x.half(), delta.half(), weight, bias]
    kernel = made(20, "layernorm", True)
    ours = support.outcome(kernel, tensors)
    assert [t.dtype for t in ours] == [torch.float16] * 4 + [torch.float32] * 2
    support.assert_agrees(ours, support.outcome(ReferenceNorm(kernel.spec), tensors, torch.float64), 1e-2)
    _, y = kernel(tensors[0], tensors[1], weight, bias)
    _, exact = ReferenceNorm(kernel.spec)(*(t.double() for t in tensors))
    assert (y != exact.half()).sum() <= 2  # fp32 may lie on the other side between two numbers


def test_two_runs_are_equal_bit_by_bit():
    tensors = support.residual_inputs((2, 9), 40, True, True, torch.float32)
    support.assert_equal(*(support.outcome(made(40, "layernorm", True), tensors) for _ in range(2)))


@pytest.mark.ci
@TYPES
@pytest.mark.parametrize("summed", [False, True])
def test_the_operators_are_whole(type_, biased, summed):
    """Schema, fake, autograd and compilation without a graph break."""
    kernel, tensors = made(20, type_, biased), support.residual_inputs((2, 3), 20, summed, biased, torch.float32)
    centred = type_ == "layernorm"
    support.assert_whole(norm_forward, (*leaves(tensors), centred, 1e-5, kernel.options))
    up, statistics = torch.ones(2, 3, 20), torch.ones(1 + centred, 6)
    given = (up, up if summed else None, tensors[0], tensors[2], statistics, biased, kernel.options)
    support.assert_whole(norm_backward, given)
    support.assert_compiles(kernel, tensors)
