"""Filters of generated answers, as a task's YAML chains them under `extract`; report/filters.py applies them.

Types and settings are those of lm-evaluation-harness's filter_list, and of the filters that come with its BBH.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import ByType, OrOne, Problem, Section

INVALID = "[invalid]"
"""Answer where none was found."""


class Filter(Section):
    """One step from what was generated to the answer."""

    categories: list[str] | None = None
    """Apply the step to documents of these categories only."""

    def problems(self) -> Iterator[Problem]:
        if self.categories == []:
            yield Problem("categories", [], "no document is of these; name some, or leave it out")


class _Search(Filter):
    """Search for a pattern."""

    pattern: str
    """A regular expression; its first group that is not empty, or the whole match if it has none, is the answer."""
    match: Annotated[int, Field(ge=-1000, le=1000)] = 0
    """Index of the match: 0 is the first, -1 the last."""
    otherwise: str = INVALID
    """The answer where nothing matches."""

    def problems(self) -> Iterator[Problem]:
        yield from Filter.problems(self)
        yield from pattern_problems("pattern", self.pattern)


class Extract(_Search):
    """A part of the text, by a regular expression."""

    type: Literal["regex"] = "regex"


class ExtractChoice(_Search):
    """The letter of one of `choices`: as the answer writes it or, failing that, of the choice whose text it holds."""

    type: Literal["multi_choice_regex"]
    pattern: str = r"(\([A-Z]\))"
    """A regular expression for the letter."""
    ignore_case: bool = False
    """Look for the text of a choice in lower case."""
    ignore_punctuation: bool = False
    """Look for the text of a choice without punctuation."""


class ExtractNumber(_Search):
    """A number, in digits or, where there are none, in English words."""

    type: Literal["number"]
    pattern: str = "([-0-9]+)"
    """A regular expression for the digits."""


class SortedWords(Filter):
    """The words of `choices` in the order in which they occur last."""

    type: Literal["word_order"]


class Map(Filter):
    """Another text for each text."""

    type: Literal["map"]
    values: dict[str, str]
    """Answer for each text."""
    otherwise: str = INVALID
    """The answer for any other text."""


class Convert(Filter):
    """The text without white space around it, or in one case."""

    type: Literal["remove_whitespace", "lowercase", "uppercase"]


AnyFilter = Annotated[Extract | ExtractChoice | ExtractNumber | SortedWords | Map | Convert, ByType("regex")]


Chain = Annotated[list[AnyFilter], OrOne(dict, Filter)]
"""Filters in order; an empty chain leaves the text as it is."""


def pattern_problems(path: str, pattern: str) -> Iterator[Problem]:
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        yield Problem(path, pattern, f"not a regular expression: {error}")
