"""The Triton kernels of cached decoding through Triton's interpreter, on a CPU; the cases are in interpreted_steps.py."""

from tests.support.interpreter import run_interpreted


def test_the_interpreted_kernels_agree_with_the_references():
    run_interpreted("steps")
