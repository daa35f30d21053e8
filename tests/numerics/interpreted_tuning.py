"""Cases of test_mamba_parts_triton.py, which runs them under TRITON_INTERPRET=1; pytest does not collect them by itself.

What `bench tune` checks before it times: a launch is right, and a kernel that computes something else is found out.
"""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from llmtrain.kernels.operation import search
from llmtrain.kernels.platform import Platform

WHERE = Platform("nvidia", "sm90", "", 1 << 36, 1)
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("conv1d", {"channels": 24, "seq_len": 20, "tokens": 40}, "bias"),
    ("conv1d", {"channels": 24, "width": 3, "seq_len": 20, "tokens": 40, "packed": True, "document": 7}, "weight"),
    ("gated_norm", {"group_size": 24, "groups": 2, "tokens": 10}, "z"),
    ("gated_norm", {"group_size": 24, "norm_first": 1, "tokens": 10}, "weight"),
    ("norm", {"dim": 600, "tokens": 10}, "weight"),
    ("norm", {"dim": 600, "centred": True, "biased": True, "summed": False, "tokens": 10}, "weight"),
    (
        "attention",
        {
            "head_dim": 32,
            "heads": 2,
            "kv_heads": 1,
            "seq_len": 64,
            "tokens": 128,
            "variant": "documents",
            "document": 20,
        },
        "v",
    ),
    ("rotary", {"head_dim": 16, "heads": 4, "kv_heads": 2, "seq_len": 5, "tokens": 10}, "sin"),
]


@pytest.mark.parametrize("operation, case, tensor", CASES)
def test_a_right_launch_passes_and_a_wrong_result_does_not(operation, case, tensor):
    made = search(operation, {**case, "dtype": "float32"}, "cpu", WHERE)
    for part in made.parts:
        first, *_, last = made.candidates(part, False)
        assert made.error(part, first) < made.tolerance
        assert made.error(part, last) < made.tolerance
    kept = getattr(made, tensor)
    setattr(made, tensor, kept + 1)
    assert all(made.error(part, made.candidates(part, True)[0]) > made.tolerance for part in made.parts)


def test_a_kernel_of_a_scan_is_checked_within_the_whole_scan():
    case = {"heads": 2, "head_dim": 16, "d_state": 16, "seq_len": 64, "tokens": 64, "packed": 1, "dtype": "float32"}
    made = search("ssd", case, "cpu", WHERE)
    for part in ("chunk_scan/64", "intra_chunk_bwd/32"):
        first = made.candidates(part, True)[0]
        assert made.error(part, first) < made.tolerance
    made.tensors[3] = made.tensors[3] + 1
    assert made.error(part, first) > made.tolerance


def test_a_kernel_of_a_delta_rule_is_checked_within_its_direction():
    case = {"heads": 1, "key_head_dim": 16, "value_head_dim": 16, "seq_len": 20, "tokens": 20, "dtype": "float16"}
    made = search("kimi_delta", case, "cpu", WHERE)
    parts = ("pair_products", "chunk_gradients")
    for part in parts:
        first, *_, last = made.candidates(part, True)
        assert max(made.error(part, first), made.error(part, last)) < made.tolerance
    assert made.error("whole", asdict(made.table)) < made.tolerance
    made.given[0].mul_(2)
    assert all(made.error(part, made.candidates(part, True)[0]) > made.tolerance for part in parts)


def test_what_is_not_given_a_launch_takes_the_tables():
    made = search("conv1d", {"channels": 24, "seq_len": 20, "tokens": 40}, "cpu", WHERE)
    run: Callable[[], Any] = made.runner("forward", None)
    (y,) = run()
    assert y.shape == (2, 20, 24)
