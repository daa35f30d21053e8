"""Processes that act as ranks can use a GPU where there is one."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.ranks import Ranks


def cannot_use_cuda() -> bool:
    """Whether CUDA would say "Cannot re-initialize CUDA in forked subprocess" here."""
    return torch.cuda._is_in_bad_fork()


@pytest.fixture
def group() -> Any:
    made: list[Ranks] = []

    def of(size: int) -> Ranks:
        made.append(Ranks(size))
        return made[-1]

    yield of
    for ranks in made:
        ranks.close()


def test_ranks_are_no_forks_where_there_is_a_gpu(group: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    torch.cuda.device_count()  # asks CUDA for devices, as the collection of tests does
    assert group(2).run(cannot_use_cuda) == [False, False]


@pytest.mark.skipif(torch.cuda.is_available(), reason="those of a machine with a GPU are spawned")
def test_those_without_are_forked_from_a_process_that_has_looked_for_one(group: Callable[[int], Ranks]):
    assert group(1).run(cannot_use_cuda) == [True]
