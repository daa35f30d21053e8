"""The Triton kernels around the scan and attention on a GPU: as exact as PyTorch's, the same every time, and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from llmtrain.kernels import platform, registry
from llmtrain.kernels.conv1d.spec import Conv1dSpec
from llmtrain.kernels.gated_norm.spec import GatedNormSpec
from llmtrain.kernels.norm.spec import NormSpec
from llmtrain.kernels.rotary.spec import RotarySpec
from tests.support import kernels as support
from tests.support.selection import cases

pytestmark = pytest.mark.gpu

BF16 = torch.bfloat16
CONVOLUTIONS = {
    "mamba": (2, 2048, 5376, 4, True),
    "odd": (3, 333, 1001, 3, True),
    "no bias": (2, 100, 256, 2, False),
    "one token": (2, 1, 96, 4, True),
    "long": (1, 16384, 512, 4, True),
}
NORMS = {
    "mamba": ((4, 512), 5120, 1, False),
    "norm first": ((4, 512), 5120, 1, True),
    "groups": ((2, 333), 7168, 2, False),
    "narrow groups": ((2, 333), 4096, 64, True),
    "widest": ((2, 100), 8192, 1, False),
    "odd": ((3, 7), 1001, 1, False),
    "one token": ((1, 1), 512, 1, True),
}
RESIDUALS: dict[str, tuple[tuple[int, ...], int, str, bool, bool]] = {
    "llama": ((4, 512), 2048, "rmsnorm", True, False),
    "mpt": ((4, 512), 2048, "layernorm", True, True),
    "zamba2": ((2, 333), 2560, "rmsnorm", True, False),
    "first of a block": ((2, 333), 2560, "rmsnorm", False, False),
    "wide": ((3, 100), 4096, "layernorm", True, False),
    "widest": ((2, 100), 8192, "layernorm", True, True),
    "odd": ((3, 7), 1001, "layernorm", True, True),
    "one token": ((1, 1), 512, "rmsnorm", True, False),
}
ROTATIONS = {"llama": (2, 2048, 32, 8, 64), "odd": (1, 333, 11, 9, 80), "one token": (3, 1, 2, 2, 128)}


def kernels(operation: registry.Operation, spec: registry.Spec) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Ours and the reference."""
    here = platform.detect()
    ours, reference = (
        registry.resolve(operation, name, spec, here).build(spec, here) for name in ("triton", "reference")
    )
    return ours, reference


def assert_as_exact(ours: Callable[..., Tensor], reference: Callable[..., Tensor], tensors: list) -> None:
    """In bf16: errors against float64 at most 1.1 x those of the reference, run by PyTorch in bf16.

    An output that PyTorch rounds once has the error of that rounding, which ours cannot go below.
    """
    exact = support.outcome(reference, tensors, torch.float64)
    found, theirs = (support.errors(support.outcome(f, tensors), exact) for f in (ours, reference))
    assert all(a <= 1.1 * max(b, 1e-4) for a, b in zip(found, theirs, strict=True)), (found, theirs)


@pytest.mark.parametrize("batch, seq_len, channels, width, biased", cases(CONVOLUTIONS, "mamba", "odd", "one token"))
def test_the_convolution_is_as_exact_as_pytorch(batch, seq_len, channels, width, biased):
    tensors = support.conv_inputs(batch, seq_len, channels, width, biased, BF16, "cuda")
    assert_as_exact(*kernels("conv1d", Conv1dSpec(channels, width)), tensors)


@pytest.mark.parametrize("leading, dim, groups, first", cases(NORMS, "mamba", "norm first", "groups", "odd"))
def test_the_norm_is_as_exact_as_pytorch(leading, dim, groups, first):
    tensors = support.norm_inputs(leading, dim, BF16, "cuda")
    assert_as_exact(*kernels("gated_norm", GatedNormSpec(dim, groups, 1e-5, first)), tensors)


@pytest.mark.parametrize("leading, dim, type_, summed, biased", RESIDUALS.values(), ids=RESIDUALS.keys())
def test_the_residual_norm_is_as_exact_as_pytorch(leading, dim, type_, summed, biased):
    """Than PyTorch compiled, which as ours rounds the gradient of x once. What ours norms is the sum before it is rounded.

    Without delta, by the norm alone: a gradient that comes to x from elsewhere is then added outside the kernel.
    """
    at = slice(0 if summed else 1, None)
    ours, reference = ((lambda *t, norm=norm: norm(*t)[at]) for norm in kernels("norm", NormSpec(dim, type_, biased)))
    tensors = support.residual_inputs(leading, dim, summed, biased, BF16, "cuda")
    torch._dynamo.reset()
    exact = support.outcome(reference, tensors, torch.float64)
    compiled = torch.compile(reference, dynamic=False)
    found, theirs = (support.errors(support.outcome(f, tensors), exact) for f in (ours, compiled))
    assert all(a <= 1.1 * max(b, 1e-4) for a, b in zip(found, theirs, strict=True)), (found, theirs)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("batch, seq_len, heads, kv_heads, head_dim", ROTATIONS.values(), ids=ROTATIONS.keys())
def test_the_rotation_is_as_exact_as_pytorch(batch, seq_len, heads, kv_heads, head_dim, per_row):
    tensors = support.rotary_inputs(batch, seq_len, heads, kv_heads, head_dim, BF16, "cuda")
    assert_as_exact(*rotated(head_dim, *[batch] * per_row, seq_len), tensors)


def rotated(head_dim: int, *leading: int) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Ours and the reference with tables [*leading, 1, head_dim / 2]."""
    ours, reference = (
        support.rotated(kernel, head_dim, *leading, device="cuda") for kernel in kernels("rotary", RotarySpec(head_dim))
    )
    return ours, reference


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.float16, 2e-3)])
def test_other_dtypes(dtype, tolerance):
    name = str(dtype).removeprefix("torch.")
    for (ours, reference), tensors in (
        (kernels("conv1d", Conv1dSpec(1001, 4, name)), support.conv_inputs(2, 333, 1001, 4, True, dtype, "cuda")),
        (
            kernels("gated_norm", GatedNormSpec(5120, 1, 1e-5, False, name)),
            support.norm_inputs((99,), 5120, dtype, "cuda"),
        ),
        (
            kernels("norm", NormSpec(2560, "layernorm", True, dtype=name)),
            support.residual_inputs((99,), 2560, True, True, dtype, "cuda"),
        ),
    ):
        exact = support.outcome(reference, tensors, torch.float64)
        assert max(support.errors(support.outcome(ours, tensors), exact)) < tolerance


def test_packed_documents_equal_the_documents_apart():
    lengths = (700, 1, 300, 2, 1045)
    tensors = support.conv_inputs(2, sum(lengths), 512, 4, True, torch.float32, "cuda")
    ids = torch.repeat_interleave(torch.arange(5), torch.tensor(lengths)).expand(2, -1).cuda()
    ours, reference = kernels("conv1d", Conv1dSpec(512, 4, "float32"))

    def apart(x, weight, bias):
        return torch.cat([reference(piece, weight, bias) for piece in x.split(lengths, 1)], 1)

    exact = support.outcome(apart, tensors, torch.float64)
    found = support.outcome(lambda *t: ours(*t, document_ids=ids), tensors)
    assert max(support.errors(found, exact)) < 1e-5


def one_of_each() -> list[tuple[Callable[..., Tensor], list]]:
    return [
        (kernels("conv1d", Conv1dSpec(5376, 4))[0], support.conv_inputs(2, 2048, 5376, 4, True, BF16, "cuda")),
        (kernels("gated_norm", GatedNormSpec(5120, 1, 1e-5))[0], support.norm_inputs((4, 512), 5120, BF16, "cuda")),
        (kernels("norm", NormSpec(2560))[0], support.residual_inputs((4, 512), 2560, True, False, BF16, "cuda")),
        (rotated(64, 333)[0], support.rotary_inputs(2, 333, 8, 2, 64, BF16, "cuda")),
    ]


def test_two_runs_are_equal_bit_by_bit():
    for kernel, tensors in one_of_each():
        support.assert_equal(*(support.outcome(kernel, tensors) for _ in range(2)))


def test_compiled_without_a_graph_break():
    for kernel, tensors in one_of_each():
        torch._dynamo.reset()
        compiled = support.outcome(torch.compile(kernel, fullgraph=True), tensors)
        support.assert_equal(compiled, support.outcome(kernel, tensors))
