"""The Triton kernels of the scan through Triton's interpreter, on a CPU.

In one process of its own: Triton reads TRITON_INTERPRET when it is imported. The cases are in interpreted_ssd.py,
interpreted_prefix_tree_kernels.py and interpreted_steps.py.
"""

from dataclasses import replace
from typing import Any

import pytest

from llmtrain.kernels import tuning
from llmtrain.kernels.operation import operation
from llmtrain.kernels.platform import Platform
from llmtrain.kernels.ssd.spec import SSDSpec
from llmtrain.kernels.ssd.triton import default_launch, launch_backward, launch_forward
from llmtrain.kernels.ssd.triton_launch import HeadLoopLaunch
from tests.support.interpreter import run_interpreted
from tests.support.live_bytes import peak_mib

H200 = Platform("nvidia", "sm90", "", 1 << 36, 132)


def test_the_interpreted_kernels_agree_with_the_reference():
    """Those of packed requests that share prefixes and of cached decoding, too."""
    run_interpreted("ssd", "prefix_tree_kernels", "steps")


@pytest.mark.slow
def test_all_of_their_cases():
    run_interpreted("ssd", cases="slow", timeout=7200)


def test_the_sequential_scan_is_taken_where_it_fills_the_device():
    """One program to a processor of 132, or two."""
    launch = default_launch(SSDSpec(80, 64, 128, 1, 256), H200)
    one, two = launch.sequential_scan, launch.sequential_scan_shared_sm
    expected = {60: None, 100: one, 128: one, 160: two, 256: two, 300: None, 320: one, 512: two, 640: two}
    assert {heads: launch.sequential_scan_for(heads, 64) for heads in expected} == expected


@pytest.mark.parametrize(
    "head_dim, parts, columns", [(64, 1, 64), (96, 2, 48), (100, 2, 50), (120, 2, 60), (128, 2, 64)]
)
def test_wide_heads_are_scanned_as_narrow_ones(head_dim, parts, columns):
    """With d_state 256 never by the sequential scan, whose state would fill all registers."""
    for d_state in (16, 64, 128, 256):
        launch = default_launch(SSDSpec(24, head_dim, d_state, 1, 256), H200)
        assert launch.head_parts(head_dim) == parts and head_dim // parts == columns
        as_many = replace(launch, split_headdim=None)
        for heads in (24, 66, 132, 320):
            found = launch.sequential_scan_for(heads, head_dim)
            assert found == as_many.sequential_scan_for(parts * heads, columns)
            assert d_state < 256 or found is None


@pytest.mark.parametrize("chunks, heads", [(256, 80), (128, 40), (32, 10), (1, 1)])
def test_few_chunks_have_their_heads_spread_over_programs(chunks, heads):
    assert HeadLoopLaunch(programs_per_sm=2, num_stages=1).heads(80, chunks, num_sms=132) == heads


@pytest.mark.parametrize("seq_len", [2048, 4096, 8192])
@pytest.mark.parametrize("heads, d_state, public", [(80, 128, 695), (80, 64, 534), (64, 128, 558)])
def test_forward_and_backward_take_no_more_memory_than_public_kernels(heads, d_state, public, seq_len):
    """public: MiB of state-spaces/mamba's at chunks of 256, bf16, 16,384 tokens; the least of the three on an H200."""
    spec = SSDSpec(heads, 64, d_state, 1, 256)
    tensors, dy = operation("ssd").inputs(spec, 16384 // seq_len, seq_len, "meta")
    options = default_launch(spec, H200).dump()

    def run() -> Any:
        given: list[Any] = [*tensors, None, None, None, None, options]
        y, last = launch_forward(*given)
        del last
        given = [dy, None, *tensors, None, None, None, None, options]
        return y, launch_backward(*given)

    assert peak_mib(run) <= public


def test_a_launch_survives_its_dump():
    for row in tuning.read_shipped("sm90").rows:
        if row.kernel == "ssd":
            assert row.launch.parse(row.launch.dump()) == row.launch
