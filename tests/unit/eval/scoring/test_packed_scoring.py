"""Host work is done while the GPU is busy, and no longer."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from llmtrain.eval.scoring.packed_scoring import _Pending, _scores


@dataclass
class Event:
    """CUDA event that is done after `looks` queries."""

    looks: int
    waited: bool = False

    def query(self) -> bool:
        self.looks -= 1
        return self.looks < 0

    def synchronize(self) -> None:
        self.waited = True


OWNERS = [(4, 2), (1, 1)]


@pytest.mark.parametrize("work", [0, 2, 9])
def test_other_work_is_done_until_the_gpu_is_done(work):
    left = [work]

    def host_work() -> bool:
        left[0] -= 1
        return left[0] >= 0

    done: Any = Event(5)
    scores = torch.tensor([-1.0, -2.0, -3.0]), torch.tensor([True, True, False])
    found = list(_scores(_Pending(OWNERS, *scores, done), host_work))
    assert found == [(4, (-3.0, True)), (1, (-3.0, False))]
    assert done.waited
    assert work - max(left[0], 0) == min(work, 5)


def test_nothing_is_waited_for_without_a_gpu():
    def host_work() -> bool:
        raise AssertionError("host work without a GPU")

    running = _Pending(OWNERS, torch.zeros(3), torch.ones(3, dtype=torch.bool), None)
    assert [row for row, _ in _scores(running, host_work)] == [4, 1]
