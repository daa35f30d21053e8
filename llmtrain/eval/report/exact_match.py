"""Exact match of generated answers, by either convention."""

import re
import string

from llmtrain.eval.report.filters import apply_filters
from llmtrain.eval.tasks.documents import Question
from llmtrain.eval.tasks.sections import FoundryPrompting, LmEvalPrompting

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_SPACES = {ord(mark): " " for mark in string.punctuation + "‘’´`"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def foundry_exact_match(text: str, question: Question, settings: FoundryPrompting) -> dict[str, bool]:
    """exact_match is True if the generated answer begins with a right one.

    As in LLM Foundry, an alias that is empty after normalisation ("The") makes every answer right; one of its 3,000
    TriviaQA questions has such an alias.
    """
    given = _until_stop(text, settings.ends)
    if settings.cot_delimiter:
        given = given.split(settings.cot_delimiter)[-1]
    clean = normalize if settings.normalize else str.strip
    right = {clean(answer) for answer in (question.answer, *question.aliases)}
    return {"exact_match": any(clean(given).startswith(answer) for answer in right)}


def normalize(text: str) -> str:
    """Lower case, punctuation as spaces, no articles, single spaces: TriviaQA's rule (Joshi et al. 2017)."""
    text = text.replace("_", " ").lower().translate(_PUNCTUATION_TO_SPACES)
    return " ".join(_ARTICLES.sub(" ", text).split())


def lm_eval_exact_match(
    text: str, question: Question, settings: LmEvalPrompting, category: str | None = None
) -> dict[str, bool]:
    """True, by name of the extraction, if the answer equals a right one after the same clean-up of both."""
    given = _until_stop(text, settings.ends)
    found = {
        name: apply_filters(given, chain, question.choices, category) for name, chain in settings.extract.items()
    } or {"exact_match": given}
    right = {_clean(answer, settings) for answer in (question.answer, *question.aliases)}
    return {name: _clean(one.strip() if settings.strip else one, settings) in right for name, one in found.items()}


def _clean(text: str, settings: LmEvalPrompting) -> str:
    for pattern in settings.ignore:
        text = re.sub(pattern, "", text)
    if settings.ignore_case:
        text = text.lower()
    return text.translate(_PUNCTUATION) if settings.ignore_punctuation else text


def _until_stop(text: str, stops: list[str]) -> str:
    """Text before the first of `stops`."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
