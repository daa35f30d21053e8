"""What `llmtrain doctor FILE` says of a block's kernels."""

import pytest

from llmtrain.doctor.blocks import reason
from llmtrain.kernels.platform import Platform
from llmtrain.models.backends import chosen
from llmtrain.schema.load import load_config

H200 = Platform("nvidia", "sm90", "NVIDIA H200", 141 << 30)
A100 = Platform("nvidia", "sm80", "NVIDIA A100", 80 << 30)


@pytest.mark.parametrize(
    ("where", "backend", "heads", "said"),
    [
        (
            H200,
            "triton",
            32,
            "; from 8,192 tokens on backward by stored gradients of scores (fixed row, not tuned: NVIDIA H200, ",
        ),
        (H200, "sdpa:flash", 32, None),
        (H200, "triton", 64, None),
        (A100, "triton", 32, None),
    ],
)
def test_a_backward_pass_by_a_fixed_row_is_named(where, backend, heads, said):
    settings = [f"model.blocks.s.backend={backend}", f"model.blocks.s.n_heads={heads}"]
    config = load_config("zamba2-2.7b", settings).model
    found = [
        reason(one, where) for one in chosen(config, where, "bfloat16", False) if one.kernel.operation == "attention"
    ]
    assert found
    for text in found:
        assert said in text if said else "stored gradients" not in text
