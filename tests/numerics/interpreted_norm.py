"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from typing import Any, Literal

import pytest
import torch

from llmtrain.kernels.norm.reference import ReferenceNorm
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.norm.triton import TritonNorm, norm_backward, norm_forward
from llmtrain.kernels.row_tiles import Launch, Tile
from tests.support import mamba_parts as around
from tests.support import norms

TYPES = pytest.mark.parametrize("type_, biased", [("rmsnorm", False), ("layernorm", False), ("layernorm", True)])


def made(
    dim: int, type_: Literal["rmsnorm", "layernorm"], biased: bool, columns: int = 16, rows: int = 1, run: int = 2,
    **how: Any,
) -> TritonNorm:  # fmt: skip
    """Several parts, tiles and programs in a small problem. how: of the backward."""
    launch = Launch(Tile(columns, 1, run, rows), Tile(columns, 1, run, rows, **how), num_sms=None)
    return TritonNorm(NormSpec(dim, type_, biased, 1e-5, "float32"), launch)


def assert_agrees(kernel: TritonNorm, tensors: list[Any], uses: Literal["both", "norm"] = "both") -> None:
    ours = around.outcome(norms.joined(kernel, uses), tensors)
    exact = around.outcome(norms.joined(ReferenceNorm(kernel.spec), uses), tensors, torch.float64)
    around.assert_agrees(ours, exact)
    assert all(t.dtype == torch.float32 for t in ours)


@TYPES
@pytest.mark.parametrize("summed", [False, True])
@pytest.mark.parametrize("dim", [48, 40, 7])
@pytest.mark.parametrize("columns, rows, run", [(16, 1, 2), (32, 4, 1), (64, 2, 4)])
def test_agrees_with_the_reference(dim, type_, biased, summed, columns, rows, run):
    tensors = norms.inputs((3, 5), dim, summed, biased, torch.float32)
    assert_agrees(made(dim, type_, biased, columns, rows, run), tensors)


@TYPES
def test_the_norm_alone_and_the_sum_with_its_norm_unused(type_, biased):
    kernel, tensors = made(40, type_, biased), norms.inputs((2, 4), 40, True, biased, torch.float32)
    assert_agrees(kernel, tensors, "norm")
    x, delta, weight, bias = tensors
    x, delta = (t.clone().requires_grad_() for t in (x, delta))
    kernel(x, delta, weight, bias)[0].sum().backward()
    assert x.grad is not None and delta.grad is not None
    assert x.grad.unique() == delta.grad.unique() == 1


@TYPES
def test_when_rows_are_read_changes_no_bit(type_, biased):
    tensors = norms.inputs((2, 4), 40, True, biased, torch.float32)
    runs = [around.outcome(norms.joined(made(40, type_, biased, prefetch=ahead)), tensors) for ahead in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@TYPES
def test_one_token_and_strides_of_every_kind(type_, biased):
    kernel = made(20, type_, biased)
    assert_agrees(kernel, norms.inputs((1, 1), 20, True, biased, torch.float32))
    x, delta, *weights = norms.inputs((2, 6), 20, True, biased, torch.float32)
    assert_agrees(kernel, [x.transpose(0, 1), delta.transpose(0, 1).contiguous(), *weights])
    assert_agrees(kernel, [x[:, ::2], delta[:1, :3].expand(2, -1, -1), *weights])


@TYPES
def test_rows_whose_mean_is_large_and_rows_without_variance(type_, biased):
    """The variance is that of what is left when the mean is gone."""
    kernel = made(20, type_, biased)
    x, _, *weights = norms.inputs((2, 6), 20, False, biased, torch.float32)
    exact = norms.joined(ReferenceNorm(kernel.spec))(
        *(t if t is None else t.double() for t in (x + 500, None, *weights))
    )
    found = norms.joined(kernel)(x + 500, None, *weights)
    torch.testing.assert_close(found.double(), exact, atol=1e-3, rtol=1e-4)
    constant = torch.ones_like(x)
    assert_agrees(kernel, [constant, -constant, *weights])


def test_gradients_have_their_tensors_dtypes_and_the_norm_is_of_the_unrounded_sum():
    x, delta, weight, bias = norms.inputs((2, 3), 20, True, True, torch.float32)
    tensors = [x.half(), delta.half(), weight, bias]
    kernel = made(20, "layernorm", True)
    ours = around.outcome(norms.joined(kernel), tensors)
    assert [t.dtype for t in ours] == [torch.float16] * 3 + [torch.float32] * 2
    around.assert_agrees(ours, around.outcome(norms.joined(ReferenceNorm(kernel.spec)), tensors, torch.float64), 1e-2)
    _, y = kernel(tensors[0], tensors[1], weight, bias)
    _, exact = ReferenceNorm(kernel.spec)(*(t.double() for t in tensors))
    assert torch.equal(y, exact.half())


def test_two_runs_are_equal_bit_by_bit():
    tensors = norms.inputs((2, 9), 40, True, True, torch.float32)
    runs = [around.outcome(norms.joined(made(40, "layernorm", True)), tensors) for _ in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.ci
@TYPES
@pytest.mark.parametrize("summed", [False, True])
def test_the_operators_are_whole(type_, biased, summed):
    """Schema, fake, autograd and compilation without a graph break."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    kernel, tensors = made(20, type_, biased), norms.inputs((2, 3), 20, summed, biased, torch.float32)
    leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
    centred = type_ == "layernorm"
    torch.library.opcheck(norm_forward, (*leaves, centred, 1e-5, kernel.options), test_utils=checks)
    up, statistics = torch.ones(2, 3, 20), torch.ones(1 + centred, 6)
    given = (up, up if summed else None, tensors[0], tensors[2], statistics, biased, kernel.options)
    torch.library.opcheck(norm_backward, given, test_utils=checks)
    whole = norms.joined(kernel)
    compiled = torch.compile(whole, fullgraph=True, backend="aot_eager")
    for a, b in zip(around.outcome(compiled, tensors), around.outcome(whole, tensors), strict=True):
        assert torch.equal(a, b)
