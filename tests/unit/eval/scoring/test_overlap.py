"""Preparation of later items, step by step, while the caller waits."""

from collections.abc import Callable

import pytest

from llmtrain.eval.scoring.overlap import Prefetcher, Steps, run_steps


def counting(log: list[tuple[int, int]]) -> Callable[[int], Steps[int]]:
    """A `make` that squares a number in three steps and logs them."""

    def make(n: int) -> Steps[int]:
        for step in range(3):
            log.append((n, step))
            yield
        return n * n

    return make


def test_all_come_in_order():
    assert list(Prefetcher([3, 1, 2], counting([]))) == [(3, 9), (1, 1), (2, 4)]
    assert list(Prefetcher([], counting([]))) == []


def test_steps_do_the_work_of_the_next_items_in_order_and_no_further(monkeypatch):
    monkeypatch.setattr("llmtrain.eval.scoring.overlap.LOOKAHEAD", 2)
    log = []
    prefetcher = Prefetcher([5, 6, 7, 8], counting(log))
    for n, _ in prefetcher:
        while prefetcher.step():
            pass
        assert log == [(item, step) for item in range(5, min(n + 3, 9)) for step in range(3)]
        assert not prefetcher.step()


def test_what_was_begun_is_finished_when_its_turn_comes():
    log = []
    prefetcher = Prefetcher([1, 2], counting(log))
    made = iter(prefetcher)
    assert next(made) == (1, 1)
    assert prefetcher.step()
    assert log[3:] == [(2, 0)]
    assert next(made) == (2, 4)
    assert log[3:] == [(2, 0), (2, 1), (2, 2)]


def test_no_step_of_a_later_item_delays_one_whose_turn_it_is():
    log = []
    assert next(iter(Prefetcher([1, 2], counting(log)))) == (1, 1)
    assert log == [(1, 0), (1, 1), (1, 2)]


def test_an_error_waits_for_its_turn():
    def make(n: int) -> Steps[int]:
        yield
        if n == 1:
            raise ValueError("of item 1")
        return n

    prefetcher = Prefetcher([0, 1, 2], make)
    made = iter(prefetcher)
    assert next(made) == (0, 0)
    while prefetcher.step():
        pass
    with pytest.raises(ValueError, match="of item 1"):
        next(made)


def test_finished_is_what_steps_come_to():
    assert run_steps(counting([])(4)) == 16
