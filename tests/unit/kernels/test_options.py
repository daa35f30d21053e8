"""Launch parameters as text: what an operator is given is what its kernels run by."""

from dataclasses import dataclass
from typing import Literal

import pytest

from llmtrain.kernels.options import Count, Flag, Options


@dataclass(frozen=True)
class Inner(Options):
    rows: Count
    prefetch: Flag = False


@dataclass(frozen=True)
class Outer(Options):
    forward: Inner
    num_sms: Count | None
    keep: Literal["all", "nothing"] = "all"


@pytest.mark.parametrize("launch", [Outer(Inner(3, True), 132, "nothing"), Outer(Inner(1), None)])
def test_they_survive_as_text(launch):
    assert Outer.parse(launch.dump()) == launch


def test_equal_launches_are_equal_texts():
    """However their text was written: what a default would say is left out."""
    told = '{"num_sms": 5, "keep": "all", "forward": {"prefetch": false, "rows": 3}}'
    assert Outer.parse(told).dump() == Outer(Inner(3), 5).dump() != Outer(Inner(3), 6).dump()


@pytest.mark.parametrize(
    "text, words",
    [
        ('{"forward": {"rows": 3}}', "launch: 'num_sms' is missing"),
        ('{"forward": {"rows": 0}, "num_sms": null}', "launch: forward: rows must be a positive integer, not 0"),
        (
            '{"forward": {"rows": 3}, "num_sms": 1, "keep": "some"}',
            "launch: keep must be one of all, nothing, not 'some'",
        ),
    ],
)
def test_a_wrong_one_is_named(text, words):
    with pytest.raises(ValueError, match=words):
        Outer.parse(text)
