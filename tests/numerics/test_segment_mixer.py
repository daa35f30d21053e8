"""The Triton kernels of a Mamba-2 mixer over segments that ranks share, through Triton's interpreter on a CPU, and the launches.

The cases are in interpreted_segment_mixer.py.
"""

import pytest

from tests.support.interpreter import run_interpreted


@pytest.mark.ci
def test_the_interpreted_operator_agrees_with_the_reference_of_one_rank():
    run_interpreted("segment_mixer")


@pytest.mark.slow
def test_all_of_its_cases():
    run_interpreted("segment_mixer", cases="slow")
