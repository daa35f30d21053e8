"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.operation import leaves
from llmtrain.kernels.rotary.operation import OPERATION
from llmtrain.kernels.rotary.reference import ReferenceRotary
from llmtrain.kernels.rotary.spec import RotarySpec
from llmtrain.kernels.rotary.triton import TritonRotary, rotary
from llmtrain.kernels.rotary.triton_launch import Launch
from tests.support import kernels as support

ROTARY = TritonRotary(Launch(block_tokens=32, block_heads=8, num_warps=4))
CASES = {
    "grouped": (2, 37, 4, 2, 16),
    "more heads than one program takes": (1, 5, 11, 9, 8),
    "a width that is no power of two": (1, 33, 2, 1, 20),
    "one token": (3, 1, 2, 2, 16),
}


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("batch, seq_len, heads, kv_heads, head_dim", CASES.values(), ids=CASES.keys())
def test_agrees_with_the_reference(batch, seq_len, heads, kv_heads, head_dim, per_row):
    leading = (*[batch] * per_row, seq_len)
    tensors = support.rotary_inputs(batch, seq_len, heads, kv_heads, head_dim)
    mine, theirs = (support.rotated(kernel, head_dim, *leading) for kernel in (ROTARY, ReferenceRotary()))
    support.assert_agrees(support.outcome(mine, tensors), support.outcome(theirs, tensors, torch.float64), 1e-5)
    q, k = ROTARY(tensors[0], tensors[1], *OPERATION.tables(RotarySpec(head_dim), *leading))
    assert q.is_contiguous() and k.is_contiguous()


def test_fp16_is_rounded_once():
    tensors = support.rotary_inputs(1, 9, 2, 1, 16, torch.float16)
    ours, theirs = (support.outcome(support.rotated(kernel, 16, 9), tensors) for kernel in (ROTARY, ReferenceRotary()))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a, b, atol=0, rtol=1e-3)


def test_back_undoes_it():
    cos, sin = OPERATION.tables(RotarySpec(16), 9)
    q, k = support.rotary_inputs(2, 9, 3, 1, 16)
    again = rotary(*rotary(q, k, cos, sin, False, ROTARY.options), cos, sin, True, ROTARY.options)
    for a, b in zip(again, (q, k), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_operator_is_whole():
    tensors, tables = support.rotary_inputs(2, 7, 3, 1, 16), OPERATION.tables(RotarySpec(16), 7)
    support.assert_whole(rotary, (*leaves(tensors), *tables, False, ROTARY.options))
    support.assert_compiles(lambda q, k: ROTARY(q, k, *tables), tensors)
