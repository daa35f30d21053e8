"""Attention in float8 on a GPU, against the definition in float64; its cases on a CPU are in tests/numerics."""

import pytest
import torch

from llmtrain.kernels import platform as platforms
from llmtrain.kernels import registry
from llmtrain.kernels.attention.operation import OPERATION
from llmtrain.kernels.attention.spec import AttentionSpec
from llmtrain.kernels.operation import Shape, leaves, relative_error, run_both

pytestmark = pytest.mark.gpu

BOUNDS = (0.07, 0.1, 0.1, 0.07)
"""Relative errors of the output, dq, dk and dv, as in tests/numerics/interpreted_attention_float8.py."""
FEATURES = {
    "plain": {},
    "ALiBi": {"alibi_max_bias": 8.0},
    "window": {"sliding_window": 300},
    "documents": {"documents": True},
    "all": {"alibi_max_bias": 8.0, "sliding_window": 300, "documents": True},
}


@pytest.mark.parametrize("seq_len", [1000, 2048])
@pytest.mark.parametrize("features", FEATURES)
@pytest.mark.parametrize("head_dim, kv_heads", [(64, 8), (128, 2)])
def test_all_agrees_with_the_definition(head_dim, kv_heads, features, seq_len):
    here = platforms.detect()
    if reason := platforms.float8_refusal(here):
        pytest.skip(reason)
    spec = AttentionSpec(8, kv_heads, head_dim, head_dim**-0.5, **FEATURES[features])
    shape = Shape(spec, 2, seq_len)
    given, up = OPERATION.draw(shape, "cuda")
    kernel = registry.resolve("attention", "triton_float8", spec, here).build(spec, here)
    attention = OPERATION.bind(kernel, shape, "cuda")
    found = OPERATION.pieces(shape, run_both(attention, leaves(given), up))
    exact = OPERATION.exact(shape, given, up)
    errors = [relative_error(a, b) for a, b in zip(found, exact, strict=True)]
    assert all(error < bound for error, bound in zip(errors, BOUNDS, strict=True)), errors
    again = run_both(attention, leaves(given), up)  # recorded and replayed: launches depend on nothing else
    assert all(torch.equal(a, b) for a, b in zip(OPERATION.pieces(shape, again), found, strict=True))
