"""Filters that find the answer in a generated text (tasks/filters.py), with the results of lm-evaluation-harness's.

Each of its filters sees every answer of a data set; here, one answer at a time.
"""

import re
import unicodedata
from collections.abc import Sequence

from llmtrain.eval.tasks.filters import AnyFilter, Convert, Extract, ExtractChoice, ExtractNumber, Map, SortedWords


def apply_filters(
    text: str, chain: Sequence[AnyFilter], choices: Sequence[str] = (), category: str | None = None
) -> str:
    """Answer in a generated text. choices, category: those of its document."""
    for step in chain:
        if step.categories is None or category in step.categories:
            text = _apply(step, text, choices)
    return text


def _apply(step: AnyFilter, text: str, choices: Sequence[str]) -> str:
    match step:
        case Extract():
            found = _found(step.pattern, text, step.match)
            return step.otherwise if found is None else found
        case ExtractChoice():
            return _found(step.pattern, text, step.match) or _choice(step, text, choices) or step.otherwise
        case ExtractNumber():
            return _found(step.pattern, text, step.match) or _spoken_number(text, step.match) or step.otherwise
        case SortedWords():
            return _sorted_words(text, choices)
        case Map():
            return step.values.get(text, step.otherwise)
        case Convert(type="lowercase"):
            return text.lower()
        case Convert(type="uppercase"):
            return text.upper()
        case Convert():
            return text.strip()


def _found(pattern: str, text: str, number: int) -> str | None:
    """Match `number` of the pattern, stripped; of a match with several groups, the first that is not empty.

    None if there is no such match, or all of its several groups are empty.
    """
    matches = list(re.finditer(pattern, text))
    if not -len(matches) <= number < len(matches):
        return None
    match = matches[number]
    if match.re.groups < 2:
        return (match[match.re.groups] or "").strip()
    return next((group.strip() for group in match.groups() if group), None)


def _choice(step: ExtractChoice, text: str, choices: Sequence[str]) -> str | None:
    """Letter of the choice whose text occurs, or of a letter after a colon. None if there is none."""
    letters = [chr(ord("A") + number) for number in range(len(choices))]
    texts = [_ignoring(step, choice.strip()) for choice in choices]
    # The longest first, so that no choice hides one that it begins.
    alternatives = "|".join(sorted(map(re.escape, texts), key=len, reverse=True))
    if found := _found(alternatives, _ignoring(step, text), step.match):
        return {other: f"({letter})" for other, letter in zip(texts, letters, strict=True)}.get(found, found)
    found = _found(rf":[\s]*({'|'.join(map(re.escape, letters))})", text, step.match)
    return found and f"({found})"


def _ignoring(step: ExtractChoice, text: str) -> str:
    text = text.lower() if step.ignore_case else text
    if not step.ignore_punctuation:
        return text
    return "".join(letter for letter in text if not unicodedata.category(letter).startswith("P"))


def _sorted_words(text: str, words: Sequence[str]) -> str:
    """Words of the list that occur in the text, each once, in the order of their last occurrences."""
    matches = re.findall("|".join(rf"\b{re.escape(word)}\b" for word in words), text)
    return " ".join(reversed(dict.fromkeys(reversed(matches))))


_UNITS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_VALUES = {
    **{word: number for number, word in enumerate(_UNITS.split())},
    **{word: 10 * number for number, word in enumerate(_TENS.split(), 2)},
    **{"hundred": 100, "thousand": 10**3, "million": 10**6, "billion": 10**9},
}
_WHOLE = "zero|one|two|three|four|five|ten|eleven|twelve|fourteen|hundred|thousand|(?:m|b|tr)illion"
_STEMS = "(?:twen|thir|for|fif|six|seven|nine)"
_NUMBER = re.compile(
    rf"(?:(?:{_WHOLE}|{_STEMS}(?:teen|ty)|eight(?:|een|y))"
    rf"(?:{_WHOLE}|{_STEMS}(?:|teen|ty)|eight(?:een|y)|[^\S\r\n]|,|and|&)+)?"
    rf"(?:{_WHOLE}|{_STEMS}(?:teen|ty)|eight(?:een|y))"
)
"""Numbers that lm-evaluation-harness finds. It passes over a lone six, seven, eight or nine, and stops at hyphens."""


def _spoken_number(text: str, number: int) -> str | None:
    found = _found(_NUMBER.pattern, text.lower(), number)
    value = _value([_VALUES[word] for word in (found or "").split() if word in _VALUES])
    return None if value is None else str(value)


def _value(numbers: list[int]) -> int | None:
    """Number of `two thousand one hundred five`; None where the order makes none."""
    if len(numbers) < 2:
        return numbers[0] if numbers else None
    total = 0
    for scale in (10**9, 10**6, 10**3):
        if scale in numbers:
            at = numbers.index(scale)
            before, numbers = numbers[:at], numbers[at + 1 :]
            if not before or max(before) > 100:
                return None
            total += _below_thousand(before) * scale
    if any(one > 100 for one in numbers):
        return None
    return total + _below_thousand(numbers) if numbers else total


def _below_thousand(numbers: list[int]) -> int:
    match numbers:
        case [first, scale]:
            return first * scale if 100 in numbers else first + scale
        case [first, scale, *rest] if len(rest) < 3:
            return first * scale + sum(rest)
    return numbers[0]
