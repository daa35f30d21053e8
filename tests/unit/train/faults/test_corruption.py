"""Ranks that compute something else than the others."""

import pytest

from llmtrain.train.faults.corruption import differing

NAN = float("nan")


@pytest.mark.parametrize(
    ("sums", "replication", "found"),
    [
        ([(1, 1)] * 4, 1, []),
        ([(1, 1), (1, 1), (1.0000000000000002, 1.0000000000000002)], 1, [2]),
        ([(1, 1), (2, 2)], 1, [0, 1]),  # which of two errs is not known
        ([(1, 1), (1, 1), (1, 3)], 1, [2]),  # differs from itself
        ([(1, 2), (3, 1), (1, 1)], 1, None),  # so do most: kernels that add in no fixed order
        ([(1, 1), (5, 5)] * 3, 2, []),  # each has its own part of the layers
        ([(1, 1), (5, 5)] * 2 + [(1, 1), (6, 6)], 2, [5]),
        ([(NAN, NAN)] * 2, 1, []),
        ([(1, 1)], 1, []),
        ([(1, 2)], 1, [0]),
    ],
)
def test_ranks_that_differ(sums, replication, found):
    answers = [("host", (float(first),), (float(second),)) for first, second in sums]
    assert differing(answers, replication) == found
