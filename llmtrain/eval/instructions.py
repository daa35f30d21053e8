"""Instructions of IFEval (Zhou et al. 2023, arXiv:2311.07911), each of which a program can check: does an answer follow it?

The checks decide as those of lm-evaluation-harness 0.4.13 do, with three exceptions, where its own are not repeatable or fail:
the language is detected with a fixed seed; a `letter` that is none (`#`) is counted all the same; an argument that is missing is
an error, not drawn at random.
"""

import importlib.util
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from inspect import signature
from typing import Any

from llmtrain.config.report import suggest
from llmtrain.eval.errors import EvalError, prefixed

_RELATIONS = ("less than", "at least")


@dataclass(frozen=True)
class Instruction:
    """One instruction with its arguments. name: IFEval's, such as `punctuation:no_comma`."""

    name: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def is_followed(self, text: str) -> bool:
        """True if the text follows the instruction; an empty one follows none."""
        return bool(text.strip()) and bool(_CHECKS[self.name](text, **self.arguments))

    def is_followed_loosely(self, text: str) -> bool:
        """True if the text follows it as it is, or without asterisks, its first line, its last line, or several of these."""
        lines = text.split("\n")
        parts = [text, *("\n".join(some).strip() for some in (lines[1:], lines[:-1], lines[1:-1]))]
        return any(self.is_followed(one) for one in dict.fromkeys([*parts, *(part.replace("*", "") for part in parts)]))


def read_instruction(name: Any, arguments: Any) -> Instruction:
    """Instruction of a record: its name and a mapping of arguments, of which null ones do not count.

    Raises EvalError for an unknown name, and for an argument that is missing, unknown, or of another kind.
    """
    if not isinstance(name, str) or name not in _CHECKS:
        raise EvalError(f"unknown instruction {name!r}; {suggest(str(name), sorted(_CHECKS), 'there are')}")
    if not isinstance(arguments, Mapping):
        raise EvalError(f"arguments of {name} are {arguments!r}; expected a mapping, which may be empty")
    given = {key: value for key, value in arguments.items() if value is not None}
    wanted = [key for key in signature(_CHECKS[name]).parameters if key != "text"]
    for key in wanted:
        if key not in given:
            raise EvalError(f"{name} needs the argument {key}; it has {', '.join(given) or 'none'}")
        _check_argument(name, key, given[key])
    for key in sorted(given.keys() - wanted):
        raise EvalError(f"{name} has no argument {key}; it has {', '.join(wanted) or 'none'}")
    if (
        name == "length_constraints:nth_paragraph_first_word"
        and not 1 <= given["nth_paragraph"] <= given["num_paragraphs"]
    ):
        raise EvalError(f"{name}: nth_paragraph is {given['nth_paragraph']} of {given['num_paragraphs']} paragraphs")
    return Instruction(name, given)


def _check_argument(name: str, key: str, value: Any) -> None:
    texts: Sequence[Any] = value if isinstance(value, list | tuple) else [value]
    if key in _TEXTS:
        good = isinstance(value, str) and bool(value.strip()) and (key != "letter" or len(value.strip()) == 1)
        expected = "one character" if key == "letter" else "a text"
    elif key in _LISTS:
        good = texts is value and len(texts) > 0 and all(isinstance(one, str) and one for one in texts)
        expected = "a list of texts"
    elif key.endswith("relation"):
        good, expected = value in _RELATIONS, f"one of {', '.join(_RELATIONS)}"
    else:
        good, expected = isinstance(value, int) and not isinstance(value, bool) and value > 0, "an integer above 0"
    if not good:
        raise EvalError(f"{name}: {key} is {value!r}; expected {expected}")
    if key in ("keyword", "keywords", "forbidden_words", "section_spliter", "postscript_marker"):
        for pattern in texts:
            with prefixed(f"{name}: {key} {pattern!r} is not a regular expression", re.error):
                re.compile(pattern)


def check_libraries(instructions: Iterable[Instruction]) -> None:
    """Check that the libraries are there that these instructions need; raises EvalError with what to install."""
    names = {instruction.name for instruction in instructions}
    for library, users in (("langdetect", _DETECTS_LANGUAGE), ("nltk", _TOKENIZES)):
        some = sorted(names & users)
        if some and importlib.util.find_spec(library) is None:
            raise EvalError(f"{some[0]} is checked with {library}, which is not installed: pip install {library}")
    if some := sorted(names & _TOKENIZES):
        try:
            _sentence_tokenizer()
        except LookupError:
            raise EvalError(
                f"{some[0]} is checked with nltk's data punkt_tab: python -m nltk.downloader punkt_tab "
                "(or put its folder tokenizers/punkt_tab into a folder that NLTK_DATA names)"
            ) from None
        except AttributeError:
            raise EvalError(f"{some[0]} is checked with nltk 3.9.1 or newer: pip install -U nltk") from None


# Libraries that only these instructions need are imported where they are used.


@cache
def _language_profiles() -> Any:
    factory: Any = importlib.import_module("langdetect.detector_factory")
    made = factory.DetectorFactory()
    made.load_profile(factory.PROFILES_DIRECTORY)
    made.set_seed(0)
    return made


def _is_language(text: str, language: str) -> bool:
    """True for a text in the language (ISO 639-1), and for one in which none can be told."""
    unknown: Any = importlib.import_module("langdetect").LangDetectException
    detector = _language_profiles().create()
    try:
        detector.append(text)
        return detector.detect() == language
    except unknown:
        return True


@cache
def _sentence_tokenizer() -> Any:
    return importlib.import_module("nltk.tokenize.punkt").PunktTokenizer("english")


def _compare(count: int, relation: str, threshold: int) -> bool:
    return count < threshold if relation == "less than" else count >= threshold


def _number_of_paragraphs(text: str, num_paragraphs: int) -> bool:
    """True for paragraphs between `***`, where only the first and the last part may be empty."""
    parts = [bool(part.strip()) for part in re.split(r"\s?\*\*\*\s?", text)]
    return all(parts[1:-1]) and sum(parts) == num_paragraphs


def _first_word_of_paragraph(text: str, num_paragraphs: int, nth_paragraph: int, first_word: str) -> bool:
    """True for paragraphs between empty lines. The nth is counted with empty ones, their number without."""
    paragraphs = text.split("\n\n")
    filled = sum(bool(one.strip()) for one in paragraphs)
    words = paragraphs[nth_paragraph - 1].split() if nth_paragraph <= filled else []
    if not words:
        return False
    begin = re.split(r"[.,?!'\"]", words[0].lstrip("'").lstrip('"'), maxsplit=1)[0]
    # Letter by letter: the lower case of a Greek sigma depends on what follows it.
    return filled == num_paragraphs and "".join(letter.lower() for letter in begin) == first_word.lower()


def _has_postscript(text: str, postscript_marker: str) -> bool:
    marker = postscript_marker.strip()
    pattern = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}.get(marker, marker.lower())
    return re.search(pattern, text.lower()) is not None


def _number_of_bullets(text: str, num_bullets: int) -> bool:
    stars = re.findall(r"^\s*\*[^\*].*$", text, re.MULTILINE)
    return len(stars) + len(re.findall(r"^\s*-.*$", text, re.MULTILINE)) == num_bullets


def _number_of_highlights(text: str, num_highlights: int) -> bool:
    once = [part.strip("*") for part in re.findall(r"\*[^\n\*]*\*", text)]
    twice = re.findall(r"\*\*([^\n\*]*)\*\*", text)
    return sum(bool(part.strip()) for part in [*once, *twice]) >= num_highlights


def _is_json(text: str) -> bool:
    text = text.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        text = text.removeprefix(fence)
    try:
        json.loads(text.removesuffix("```").strip())
    except (ValueError, RecursionError):
        return False
    return True


def _is_two_responses(text: str) -> bool:
    parts = [part.strip() for part in text.split("******")]
    filled = [part for part in parts if part]
    return all(parts[1:-1]) and len(filled) == 2 and filled[0] != filled[1]


def _is_quoted(text: str) -> bool:
    text = text.strip()
    return len(text) > 1 and text[0] == text[-1] == '"'


_CHECKS: dict[str, Callable[..., bool]] = {
    "keywords:existence": lambda text, keywords: all(re.search(one, text, re.IGNORECASE) for one in keywords),
    "keywords:frequency": lambda text, keyword, frequency, relation: _compare(
        len(re.findall(keyword.strip(), text, re.IGNORECASE)), relation, frequency
    ),
    "keywords:forbidden_words": lambda text, forbidden_words: (
        not any(re.search(rf"\b{word}\b", text, re.IGNORECASE) for word in forbidden_words)
    ),
    "keywords:letter_frequency": lambda text, letter, let_frequency, let_relation: _compare(
        text.lower().count(letter.strip().lower()), let_relation, let_frequency
    ),
    "language:response_language": _is_language,
    "length_constraints:number_sentences": lambda text, num_sentences, relation: _compare(
        len(_sentence_tokenizer().tokenize(text)), relation, num_sentences
    ),
    "length_constraints:number_paragraphs": _number_of_paragraphs,
    "length_constraints:number_words": lambda text, num_words, relation: _compare(
        len(re.findall(r"\w+", text)), relation, num_words
    ),
    "length_constraints:nth_paragraph_first_word": _first_word_of_paragraph,
    "detectable_content:number_placeholders": lambda text, num_placeholders: (
        len(re.findall(r"\[.*?\]", text)) >= num_placeholders
    ),
    "detectable_content:postscript": _has_postscript,
    "detectable_format:number_bullet_lists": _number_of_bullets,
    "detectable_format:constrained_response": lambda text: any(
        f"My answer is {answer}." in text for answer in ("yes", "no", "maybe")
    ),
    "detectable_format:number_highlighted_sections": _number_of_highlights,
    "detectable_format:multiple_sections": lambda text, section_spliter, num_sections: (
        len(re.findall(rf"\s?{section_spliter.strip()}\s?\d+\s?", text)) >= num_sections
    ),
    "detectable_format:json_format": _is_json,
    "detectable_format:title": lambda text: any(
        title.lstrip("<").rstrip(">").strip() for title in re.findall(r"<<[^\n]+>>", text)
    ),
    "combination:two_responses": _is_two_responses,
    "combination:repeat_prompt": lambda text, prompt_to_repeat: (
        text.strip().lower().startswith(prompt_to_repeat.strip().lower())
    ),
    "startend:end_checker": lambda text, end_phrase: (
        text.strip().strip('"').lower().endswith(end_phrase.strip().lower())
    ),
    "startend:quotation": _is_quoted,
    "change_case:capital_word_frequency": lambda text, capital_frequency, capital_relation: _compare(
        sum(word.isupper() for word in importlib.import_module("nltk").word_tokenize(text)),
        capital_relation,
        capital_frequency,
    ),
    "change_case:english_capital": lambda text: text.isupper() and _is_language(text, "en"),
    "change_case:english_lowercase": lambda text: text.islower() and _is_language(text, "en"),
    "punctuation:no_comma": lambda text: "," not in text,
}
"""Does a text follow an instruction? By the text and the instruction's arguments, under IFEval's names."""
_LISTS = {"keywords", "forbidden_words"}
_TEXTS = {"keyword", "letter", "language", "first_word", "postscript_marker", "section_spliter"}
_TEXTS |= {"prompt_to_repeat", "end_phrase"}
"""Arguments that are lists of texts, and texts; those that end in `relation` are of _RELATIONS, all others numbers."""
_DETECTS_LANGUAGE = {"language:response_language", "change_case:english_capital", "change_case:english_lowercase"}
_TOKENIZES = {"length_constraints:number_sentences", "change_case:capital_word_frequency"}
