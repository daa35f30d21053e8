"""Bubbles of pipelines as `benchmarks parallel` measures them."""

import pytest

from benchmarks.programs.training.parallel import bubble
from llmtrain.plan.scaling import pass_seconds


@pytest.mark.parametrize(("gathered", "summed", "around"), [(0.0, 0.0, 0.0), (5.0, 0.0, 1.0), (4.0, 3.0, 0.5)])
def test_a_bubble_is_without_what_happens_once_a_batch(gathered: float, summed: float, around: float):
    """gathered: milliseconds by which the first forward pass of either stage is longer than others, summed: the last backward."""
    n, forward, backward = 4, 1.0, 2.0
    took = pass_seconds([forward] * 2, [backward] * 2, 1, n)
    whole = took + 2 * (gathered + summed) + around
    passes = [
        {f"forward {stage}": [forward + gathered, *[forward] * (n - 1)], f"backward {stage}": [backward] * (n - 1)}
        for stage in (0, 1)
    ]
    for stage, of in enumerate(passes):
        of[f"backward {stage}"].append(backward + summed)
    found = bubble([(passes[0], whole, around), (passes[1], whole, around + 7.0)])  # the second stage begins later
    assert found["bubble_percent"] == pytest.approx(100 / (n + 1))
    assert found["once_ms"] == pytest.approx([gathered + summed] * 2 + [around])
    assert found["passes_ms"] == {"forward 0": 1, "backward 0": 2, "forward 1": 1, "backward 1": 2}
