"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

from typing import Any

import pytest
import torch

from llmtrain.kernels.gated_norm.reference import ReferenceGatedNorm
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.gated_norm.triton import TritonGatedNorm, gated_norm_backward, gated_norm_forward
from llmtrain.kernels.gated_norm.triton_launch import Launch, Tile
from llmtrain.kernels.operation import leaves
from tests.support import kernels as support


def made(spec: GatedNormSpec, columns: int = 16, rows: int = 1, run: int = 2, **how: Any) -> TritonGatedNorm:
    """Several parts, tiles and programs in a small problem."""
    tile = Tile(columns, 1, run, rows, **how)
    return TritonGatedNorm(spec, Launch(tile, tile, num_sms=None))


def spec(dim: int, groups: int = 1, norm_first: bool = False) -> GatedNormSpec:
    return GatedNormSpec(dim, groups, 1e-5, norm_first, "float32")


def assert_agrees(kernel: TritonGatedNorm, tensors) -> None:
    ours = support.outcome(kernel, tensors)
    support.assert_agrees(ours, support.outcome(ReferenceGatedNorm(kernel.spec), tensors, torch.float64))
    assert ours[0].is_contiguous()
    assert all(t.dtype == torch.float32 for t in ours)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("dim, groups", [(48, 1), (40, 2), (7, 1), (90, 3)])
@pytest.mark.parametrize("columns, rows, run", [(16, 1, 2), (32, 4, 1), (64, 2, 4)])
def test_agrees_with_the_reference(dim, groups, norm_first, columns, rows, run):
    tensors = support.norm_inputs((3, 5), dim, torch.float32)
    assert_agrees(made(spec(dim, groups, norm_first), columns, rows, run), tensors)


@pytest.mark.ci
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("columns, rows, run", [(16, 1, 3), (64, 2, 1)])
@pytest.mark.parametrize("how", [{"prefetch": True}, {"reload": False}, {"prefetch": True, "reload": False}])
def test_when_rows_are_read_changes_no_bit(norm_first, columns, rows, run, how):
    tensors = support.norm_inputs((2, 4), 40, torch.float32)
    runs = [support.outcome(made(spec(40, 2, norm_first), columns, rows, run, **more), tensors) for more in ({}, how)]
    support.assert_equal(*runs)


@pytest.mark.parametrize("norm_first", [False, True])
def test_gates_of_any_size_are_as_exact(norm_first):
    """exp(-z) is infinite, and nothing."""
    x, z, weight = support.norm_inputs((2, 3), 20, torch.float32)
    assert_agrees(made(spec(20, 2, norm_first)), [x, 40 * z, weight])


@pytest.mark.parametrize("norm_first", [False, True])
def test_one_token_and_strides_of_every_kind(norm_first):
    kernel = made(spec(20, 2, norm_first))
    x, z, weight = support.norm_inputs((1, 1), 20, torch.float32)
    assert_agrees(kernel, [x, z, weight])
    x, z, weight = support.norm_inputs((2, 6), 20, torch.float32)
    assert_agrees(kernel, [x.transpose(1, 2).contiguous().transpose(1, 2), z[:1].expand(2, -1, -1), weight])
    assert_agrees(kernel, [x[:, ::2], z[:, ::2], weight])
    assert_agrees(kernel, [x[0], z[1], weight])


def test_gradients_have_their_tensors_dtypes():
    x, z, weight = support.norm_inputs((2, 3), 20, torch.float32)
    tensors = [x.half(), z.half(), weight]
    kernel = made(spec(20, 2))
    ours = support.outcome(kernel, tensors)
    assert [t.dtype for t in ours] == [torch.float16] * 3 + [torch.float32]
    support.assert_agrees(ours, support.outcome(ReferenceGatedNorm(kernel.spec), tensors, torch.float64), 1e-2)


def test_two_runs_are_equal_bit_by_bit():
    tensors = support.norm_inputs((2, 9), 40, torch.float32)
    runs = [support.outcome(made(spec(40)), tensors) for _ in range(2)]
    support.assert_equal(*runs)


def test_the_operator_is_whole():
    """Schema, fake, autograd and compilation without a graph break."""
    kernel = made(spec(20, 2, True))
    tensors = support.norm_inputs((2, 3), 20, torch.float32)
    support.assert_whole(gated_norm_forward, (*leaves(tensors), 2, 1e-5, True, kernel.options))
    support.assert_whole(gated_norm_backward, (torch.ones(2, 3, 20), *tensors, torch.ones(6, 2), True, kernel.options))
    support.assert_compiles(kernel, tensors)
