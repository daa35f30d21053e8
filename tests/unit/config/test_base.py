"""Durations: how long training, warmup and intervals are."""

from __future__ import annotations

import pytest
from pydantic_core import PydanticCustomError

from llmtrain.config.base import Duration


@pytest.mark.parametrize(
    "text,value,unit",
    [
        ("300 steps", 300, "steps"),
        ("1 step", 1, "steps"),
        ("26e9 tokens", 26e9, "tokens"),
        ("1_000 steps", 1000, "steps"),
        ("1.5 epochs", 1.5, "epochs"),
        ("5 %", 0.05, "fraction"),
        ("100%", 1.0, "fraction"),
    ],
)
def test_parse(text, value, unit):
    assert Duration.parse(text) == Duration(value, unit)


@pytest.mark.parametrize("text", [300, None, "300", "300 stp", "-3 steps", "1.5 steps", "101 %", "steps", "1 2 steps"])
def test_what_is_not_a_duration(text):
    with pytest.raises(PydanticCustomError):
        Duration.parse(text)


@pytest.mark.parametrize("text", ["300 steps", "26000000000 tokens", "1.5 epochs", "5 %", "12.5 %"])
def test_text_of_a_duration_reads_back_as_the_same(text):
    assert str(Duration.parse(text)) == text
    assert Duration.parse(str(Duration.parse(text))) == Duration.parse(text)


@pytest.mark.parametrize(
    "text,steps", [("7 steps", 7), ("1000 tokens", 4), ("2 epochs", 20), ("0.5 epochs", 5), ("10 %", 5)]
)
def test_in_steps(text, steps):
    assert Duration.parse(text).steps(tokens_per_step=256, steps_per_epoch=10, total_steps=50) == steps


@pytest.mark.parametrize("text", ["2 epochs", "10 %"])
def test_in_steps_needs_what_it_is_relative_to(text):
    with pytest.raises(ValueError, match="not known here"):
        Duration.parse(text).steps(tokens_per_step=256, steps_per_epoch=None, total_steps=None)
