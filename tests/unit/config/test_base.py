"""Durations: how long training, warmup and intervals are. Choices of sections that have a default."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import Field
from pydantic_core import PydanticCustomError

from llmtrain.config.base import ByType, Duration, Problem, Section
from llmtrain.config.decode import decode
from llmtrain.config.schema_tree import with_defaults


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


class Plain(Section):
    type: Literal["plain"] = "plain"
    rates: tuple[float, float] = (0.5, 0.9)


class Other(Section):
    type: Literal["other"]
    rate: Annotated[float, Field(gt=0)]


class Chooser(Section):
    one: Annotated[Plain, ByType("plain")]
    of_two: Annotated[Plain | Other, ByType("plain")] = Plain()


def chooser(**of_two: Any) -> tuple[Any, list[Problem]]:
    return decode(Chooser, with_defaults(Chooser, {"one": {}, "of_two": of_two}))


def test_a_choice_without_type_is_its_default():
    made, problems = chooser(rates=[0.1, 0.2])
    assert problems == [] and made == Chooser(one=Plain(), of_two=Plain(rates=(0.1, 0.2)))
    made, _ = chooser(type="other", rate=1.0)
    assert made.of_two == Other(type="other", rate=1.0)


def test_mistakes_in_a_choice_with_a_default_have_their_paths():
    assert [p.path for p in chooser(rates=[0.1])[1]] == ["of_two.rates"]
    assert [p.path for p in chooser(type="other", rate=-1.0, rates=0)[1]] == ["of_two.rates", "of_two.rate"]
    [problem] = chooser(type="othr", rate=1.0)[1]
    assert problem.path == "of_two.type" and "did you mean other?" in problem.message
    [problem] = chooser(type=[1])[1]
    assert problem.path == "of_two.type"
    [problem] = decode(Chooser, {"one": {}, "of_two": 3})[1]
    assert problem.path == "of_two" and "mapping" in problem.message
