"""The next item is made while the caller is at work with one."""

from __future__ import annotations

import threading

import pytest

from llmtrain.eval.ahead import ahead


def test_all_come_in_order():
    assert list(ahead([3, 1, 2], lambda n: n * n)) == [(3, 9), (1, 1), (2, 4)]
    assert list(ahead([], lambda n: n)) == []


def test_the_next_is_made_meanwhile_and_no_further():
    made = {n: threading.Event() for n in range(4)}

    def make(n: int) -> int:
        made[n].set()
        return n

    for n, _ in ahead(range(4), make):
        if n < 3:
            assert made[n + 1].wait(10)
        assert not any(made[later].is_set() for later in range(n + 2, 4))


def test_an_error_waits_for_its_turn():
    def make(n: int) -> int:
        if n == 1:
            raise ValueError("of item 1")
        return n

    made = ahead([0, 1, 2], make)
    assert next(made) == (0, 0)
    with pytest.raises(ValueError, match="of item 1"):
        next(made)
