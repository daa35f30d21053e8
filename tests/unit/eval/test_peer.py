"""Timing of a slow harness, by a stand-in that takes a second per document."""

from typing import Any

import pytest
import torch

from benchmarks.harness import eval_peer
from benchmarks.harness.eval_peer import measure_peer

CHOICES = 4


class Slow:
    """seconds: for a request, with an overhead for each call. Its log-likelihoods are the requests' numbers."""

    def __init__(self, seconds: float, overhead: float = 0.0, too_large: int = 1000):
        self.seconds, self.overhead, self.too_large = seconds, overhead, too_large
        self.now, self.batch_size_per_gpu = 0.0, 1
        self.calls: list[list[int]] = []

    def loglikelihood(self, requests: list[int], disable_tqdm: bool) -> list[tuple[float, bool]]:
        if self.batch_size_per_gpu >= self.too_large:
            raise torch.cuda.OutOfMemoryError
        self.now += self.overhead + self.seconds * len(requests) / self.batch_size_per_gpu
        self.calls.append(list(requests))
        return [(float(request), False) for request in requests]


@pytest.fixture
def measure(monkeypatch):
    def measured(peer: Slow, documents: int, batches: list[int], **options: Any) -> Any:
        monkeypatch.setattr(eval_peer, "clock", lambda: peer.now)
        asked: Any = [(at // CHOICES, at) for at in range(CHOICES * documents)]
        ours = [float(at) for at in range(len(asked))]
        ours[0] = 0.5
        return measure_peer(peer, asked, ours, batches, **options)

    return measured


def test_everything_is_timed_when_there_is_time(measure):
    peer = Slow(1.0)
    found = measure(peer, 50, [1, 2])
    assert (found.rate, found.batch, found.documents) == (2 / CHOICES, 2, 50)
    assert (found.difference, found.agreement) == (0.5, 1.0)
    assert sorted(peer.calls[-1]) == list(range(200))


def test_a_slow_one_is_stopped_between_chunks(measure):
    peer = Slow(1.0, overhead=2.0)
    found = measure(peer, 1000, [1], seconds=1000.0)
    timed = [call for call in peer.calls if len(call) >= 8 * CHOICES]
    assert 8 < found.documents < 1000
    assert peer.now < 1000 * 1.2
    assert found.rate == pytest.approx(1 / CHOICES, rel=0.05)
    numbers = {at // CHOICES for call in timed for at in call}
    assert max(numbers) > 900 and min(numbers) < 100  # from the whole task
    hopeless = Slow(1.0)
    assert measure(hopeless, 1000, [1], seconds=1.0).documents == 8
    assert hopeless.now == CHOICES * (1 + 1 + 8)


def test_a_limit_is_spread_over_the_task(measure):
    peer = Slow(1.0)
    found = measure(peer, 404, [1], limit=101)
    assert found.documents == 101 and len(set(peer.calls[-1])) == 404
    assert {at // CHOICES for at in peer.calls[-1]} == set(range(0, 404, 4))


def test_what_does_not_fit_is_passed_over(measure):
    assert measure(Slow(1.0, too_large=8), 40, [2, 8]).batch == 2
    assert measure(Slow(1.0, too_large=2), 40, [2, 8]) is None
