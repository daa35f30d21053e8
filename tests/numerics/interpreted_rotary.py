"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself."""

import pytest
import torch

from llmtrain.kernels.rotary.reference import ReferenceRotary
from llmtrain.kernels.rotary.triton import TritonRotary, rotary
from llmtrain.kernels.rotary.triton_launch import Launch
from tests.support import mamba_parts as around
from tests.support.rotations import both, inputs, tables

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
    cos, sin = tables(*[batch] * per_row, seq_len, 1, head_dim // 2)
    tensors = inputs(batch, seq_len, heads, kv_heads, head_dim)
    ours = around.outcome(both(ROTARY, cos, sin), tensors)
    around.assert_agrees(ours, around.outcome(both(ReferenceRotary(), cos, sin), tensors, torch.float64), 1e-5)
    q, k = ROTARY(tensors[0], tensors[1], cos, sin)
    assert q.is_contiguous() and k.is_contiguous()


def test_fp16_is_rounded_once():
    cos, sin = tables(9, 1, 8)
    tensors = inputs(1, 9, 2, 1, 16, torch.float16)
    ours, theirs = (around.outcome(both(kernel, cos, sin), tensors) for kernel in (ROTARY, ReferenceRotary()))
    for a, b in zip(ours, theirs, strict=True):
        assert a.dtype == torch.float16
        torch.testing.assert_close(a, b, atol=0, rtol=1e-3)


def test_back_undoes_it():
    cos, sin = tables(9, 1, 8)
    q, k = inputs(2, 9, 3, 1, 16)
    again = rotary(*rotary(q, k, cos, sin, False, ROTARY.options), cos, sin, True, ROTARY.options)
    for a, b in zip(again, (q, k), strict=True):
        torch.testing.assert_close(a, b, atol=1e-6, rtol=1e-5)


def test_the_operator_is_whole():
    cos, sin = tables(7, 1, 8)
    q, k = (t.detach().requires_grad_() for t in inputs(2, 7, 3, 1, 16))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(rotary, (q, k, cos, sin, False, ROTARY.options), test_utils=checks)
    compiled = torch.compile(ROTARY.__call__, fullgraph=True, backend="aot_eager")
    for a, b in zip(compiled(q, k, cos, sin), ROTARY(q, k, cos, sin), strict=True):
        torch.testing.assert_close(a, b, atol=0, rtol=0)
