"""Filters of lm-evaluation-harness 0.4.13: from the answers of a model to what the metrics compare (`filter_list`).

A filter maps the answers of all requests at once, because one that a task brings as code may look at all of them:
answers[i] is the list of answers to request i, one for each of the task's `repeats`, until `take_first` leaves one.
"""

from __future__ import annotations

import inspect
import re
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.code import load_function
from llmtrain.eval.lm_eval_tasks.yaml_file import Function

Answers = list[Any]
Records = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Filter:
    """One filter. function: its name, or code: a class with `apply(answers, records)`. arguments: those of the YAML."""

    function: str | Function
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def apply(self, answers: Answers, records: Records) -> Answers:
        if isinstance(self.function, Function):
            return list(load_function(self.function)(**self.arguments).apply(answers, records))
        if self.function == "custom":
            return list(load_function(self.arguments["filter_fn"])(answers, records))
        return FILTERS[self.function](answers, records, **self.arguments)


@dataclass(frozen=True)
class FilterChain:
    """Filters one after another. name: what follows the metric's name in results, but for `none`."""

    name: str
    filters: tuple[Filter, ...]

    def apply(self, answers: Answers, records: Records) -> Answers:
        """Answers that metrics compare, one for each request. Raises EvalError for answers that a filter cannot handle."""
        for one in self.filters:
            try:
                answers = one.apply(answers, records)
            except EvalError:
                raise
            except Exception as error:
                name = one.function if isinstance(one.function, str) else one.function.reference
                reason = str(error) or type(error).__name__
                raise EvalError(f"filter_list: {self.name}: {name} failed: {reason}") from None
        return answers


DEFAULT = (FilterChain("none", (Filter("take_first"),)),)


def read_filters(given: Any, output_type: str, repeats: int = 1) -> tuple[FilterChain, ...]:
    """Chains of a task's `filter_list`. repeats: answers to a request. Raises EvalError with the key and the name of what there
    is not."""
    if given is None:
        return DEFAULT
    if not given:
        raise EvalError("filter_list: empty; without it, the first answer is taken as it is")
    chains = []
    for number, chain in enumerate(given):
        key = f"filter_list.{number}"
        if not isinstance(chain, dict) or not isinstance(chain.get("filter"), list) or "name" not in chain:
            raise EvalError(f"{key}: expected name and filter, a list of functions")
        chains.append(FilterChain(str(chain["name"]), tuple(_read(f"{key}.filter", one) for one in chain["filter"])))
    for chain in chains:
        _check_counts(chain, repeats)
        if [one.name for one in chains].count(chain.name) > 1:
            raise EvalError(f"filter_list: two chains are called '{chain.name}'; their scores would have one name")
        if output_type != "generate_until" and chain.filters != DEFAULT[0].filters:
            raise EvalError(
                f"filter_list: {chain.name}: log-likelihoods can pass take_first alone; filters are for texts"
            )
    return tuple(chains)


def _check_counts(chain: FilterChain, repeats: int) -> None:
    """Check that each take_first_k gets as many answers as it takes, up to a filter whose answers only running it tells."""
    for one in chain.filters:
        if isinstance(one.function, Function) or one.function in ("custom", "take_first"):
            return
        if one.function == "take_first_k":
            k = one.arguments["k"]
            if k > repeats:
                raise EvalError(f"filter_list: {chain.name}: take_first_k: {k} of {repeats} answers; raise `repeats`")
            repeats = k
        elif one.function == "majority_vote":
            repeats = 1


def _read(key: str, given: Any) -> Filter:
    if not isinstance(given, dict) or "function" not in given:
        raise EvalError(f"{key}: expected a mapping with `function`, found {given!r}")
    function = given["function"]
    arguments = {name: value for name, value in given.items() if name != "function"}
    if isinstance(function, Function):
        return Filter(function, arguments)
    if function == "custom":
        if not isinstance(arguments.get("filter_fn"), Function):
            raise EvalError(f"{key}: custom needs filter_fn: !function of a Python file")
        return Filter(function, arguments)
    if function not in FILTERS:
        raise EvalError(f"{key}: there is no filter '{function}'; {suggest(str(function), FILTERS, 'filters are')}")
    known = list(inspect.signature(FILTERS[function]).parameters)[2:]
    for name in arguments:
        if name not in known:
            raise EvalError(f"{key}: {function} has no setting '{name}'; {suggest(name, known)}")
    if function == "take_first_k" and (type(arguments.get("k")) is not int or arguments["k"] < 1):
        raise EvalError(f"{key}: take_first_k needs k, a number of answers")
    if function == "map":
        _check_mapping(key, arguments.get("mapping_dict"))
    _check_pattern(f"{key}: {function}", arguments.get("regex_pattern", ""))
    check_patterns(f"{key}: {function}: regexes_to_ignore", arguments.get("regexes_to_ignore"))
    return Filter(function, arguments)


def _check_mapping(key: str, mapping: Any) -> None:
    """Check that an answer, which is a text, can equal each key: YAML 1.1 reads `yes` as true and `1` as a number."""
    if not isinstance(mapping, dict):
        raise EvalError(f"{key}: map needs mapping_dict, a mapping of answers, found {mapping!r}")
    wrong = [one for one in mapping if not isinstance(one, str)]
    if wrong:
        advice = "put yes, no and the like in quotes" if isinstance(wrong[0], bool) else "put it in quotes"
        raise EvalError(f"{key}: mapping_dict: the key {wrong[0]!r} is no text, and no answer can equal it; {advice}")


def check_patterns(key: str, patterns: Any) -> None:
    """Check a list of regular expressions, or None. Raises EvalError, also for a text, whose every letter would be a pattern."""
    if patterns is None:
        return
    if not isinstance(patterns, list):
        raise EvalError(f"{key}: expected a list of regular expressions, found {patterns!r}")
    for pattern in patterns:
        _check_pattern(key, pattern)


def _check_pattern(key: str, pattern: Any) -> None:
    """Check a regular expression; raises EvalError."""
    if not isinstance(pattern, str):
        raise EvalError(f"{key}: expected a regular expression, found {pattern!r}")
    try:
        re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        raise EvalError(f"{key}: {pattern!r} is not a regular expression: {error}") from None


def _each(change: Callable[[Any], Any], answers: Answers) -> Answers:
    return [[change(answer) for answer in some] for some in answers]


def take_first(answers: Answers, records: Records) -> Answers:
    return [some[0] for some in answers]


def take_first_k(answers: Answers, records: Records, k: int = 1) -> Answers:
    if answers and len(answers[0]) < k:
        raise EvalError(f"filter_list: take_first_k: {k} of {len(answers[0])} answers; raise `repeats`")
    return [some[:k] for some in answers]


def majority_vote(answers: Answers, records: Records) -> Answers:
    """The most frequent answer, of equals the one that came first."""
    return [[Counter(some).most_common(1)[0][0]] for some in answers]


def remove_whitespace(answers: Answers, records: Records) -> Answers:
    return _each(str.strip, answers)


def lowercase(answers: Answers, records: Records) -> Answers:
    return _each(str.lower, answers)


def uppercase(answers: Answers, records: Records) -> Answers:
    return _each(str.upper, answers)


def map_values(
    answers: Answers, records: Records, mapping_dict: dict | None = None, default_value: Any = None
) -> Answers:
    return _each(lambda answer: (mapping_dict or {}).get(answer, default_value), answers)


_GSM8K = r"#### (\-?[0-9\.\,]+)"


def regex(
    answers: Answers, records: Records, regex_pattern: str = _GSM8K, group_select: int = 0, fallback: str = "[invalid]"
) -> Answers:
    """Match number group_select of the pattern; of a match with several groups, the first that is not empty."""
    pattern = re.compile(regex_pattern)

    def change(answer: Any) -> Any:
        found = pattern.findall(answer) if isinstance(answer, str) else []
        if not found:
            return fallback
        match = found[group_select]
        return (next(filter(None, match), fallback) if isinstance(match, tuple) else match).strip()

    return _each(change, answers)


def multi_choice_regex(
    answers: Answers,
    records: Records,
    regex_pattern: str = _GSM8K,
    group_select: int = 0,
    fallback: str = "[invalid]",
    ignore_case: bool = False,
    ignore_punctuation: bool = False,
    regexes_to_ignore: list[str] | None = None,
) -> Answers:
    """Letter of a choice, "(A)": by the pattern; else by a choice's text in the answer; else by a letter after a colon.

    Records have their choices in `choices`.
    """

    def simplified(text: str) -> str:
        for pattern in regexes_to_ignore or ():
            text = re.sub(pattern, "", text)
        text = text.lower() if ignore_case else text
        return text.translate(_punctuation()) if ignore_punctuation else text

    def match_of(pattern: re.Pattern[str], text: Any, letters: Mapping[str, str]) -> str | None:
        found = pattern.findall(text) if isinstance(text, str) else []
        if not found:
            return None
        match = found[group_select]
        match = (next(filter(None, match), "") if isinstance(match, tuple) else match).strip()
        return letters.get(match, match)

    wanted = re.compile(regex_pattern)
    made = []
    for some, record in zip(answers, records, strict=True):
        texts = [simplified(choice.strip()) for choice in record["choices"]]
        letters = [chr(ord("A") + number) for number in range(len(texts))]
        by_text = {text: f"({letter})" for text, letter in zip(texts, letters, strict=True)}
        by_letter = {letter: f"({letter})" for letter in letters}
        # The longest first: a choice may begin with another.
        alternatives = sorted((re.escape(text) for text in texts), key=len, reverse=True)
        text_pattern = re.compile("|".join(alternatives))
        letter_pattern = re.compile(rf":[\s]*({'|'.join(letters)})")
        made.append(
            [
                match_of(wanted, answer, {})
                or match_of(text_pattern, simplified(answer), by_text)
                or match_of(letter_pattern, answer, by_letter)
                or fallback
                for answer in some
            ]
        )
    return made


@cache
def _punctuation() -> dict[int, None]:
    marks = (i for i in range(sys.maxunicode) if unicodedata.category(chr(i)).startswith("P"))
    return dict.fromkeys(marks)


def regex_pos(
    answers: Answers,
    records: Records,
    regex_pattern: str = "",
    group_select: int = 0,
    fallback: list[str] | None = None,
) -> Answers:
    """Tags of the pairs ('token', 'TAG') in an answer; pattern and group have no effect, as in lm-evaluation-harness."""
    pairs = re.compile(r"\('([^']*)', '([^']*)'\)")

    def change(answer: Any) -> list[str]:
        found = pairs.findall(answer) if isinstance(answer, str) else answer
        return [tag for _, tag in found] or fallback or ["invalid"]

    return _each(change, answers)


_ENTITIES = {
    **dict.fromkeys(("person", "people", "persons", "per"), "PER"),
    **dict.fromkeys(("location", "counties", "places", "country", "continent", "loc"), "LOC"),
    **dict.fromkeys(("organization", "company", "org"), "ORG"),
    **dict.fromkeys(("time", "date"), "DATE"),
}


def format_span(answers: Answers, records: Records) -> Answers:
    """Named entities as "per: name $ loc: name" from lines "person: name, name"."""

    def change(answer: str) -> str:
        text = answer.lower()
        for word, label in _ENTITIES.items():
            text = re.sub(rf"\b{word}\s*:", f"{label}:", text)
        text = text.replace("$$", "$").rstrip("$").replace("\n", "$").strip()
        found = re.findall(r"\b(PER|LOC|ORG|DATE):\s*([^$]+)", text)
        names = ((label.lower(), name.strip()) for label, some in found for name in some.split(","))
        return " $ ".join(f"{label}: {name}" for label, name in names if name.lower() != "none")

    return _each(change, answers)


FILTERS: dict[str, Callable[..., Answers]] = {
    "take_first": take_first,
    "take_first_k": take_first_k,
    "majority_vote": majority_vote,
    "remove_whitespace": remove_whitespace,
    "lowercase": lowercase,
    "uppercase": uppercase,
    "map": map_values,
    "regex": regex,
    "multi_choice_regex": multi_choice_regex,
    "regex_pos": regex_pos,
    "format_span": format_span,
}
