"""Whether a generated text answers the question, by either convention."""

from __future__ import annotations

import re
import string

from llmtrain.eval.tasks.documents import Question
from llmtrain.eval.tasks.sections import Extract, FoundryPrompting, LmEvalPrompting

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_SPACES = {ord(mark): " " for mark in string.punctuation + "‘’´`"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def foundry_correct(text: str, question: Question, style: FoundryPrompting) -> dict[str, bool]:
    """Right when the answer begins with one of the right answers.

    As in LLM Foundry, a right answer of which normalisation leaves nothing ("The") makes every answer right; of its
    3,000 TriviaQA questions, one has such an alias.
    """
    given = _cut(text, style.ends)
    if style.cot_delimiter:
        given = given.split(style.cot_delimiter)[-1]
    clean = normalize if style.normalize else str.strip
    right = {clean(answer) for answer in (question.answer, *question.aliases)}
    return {"exact_match": any(clean(given).startswith(answer) for answer in right)}


def normalize(text: str) -> str:
    """Lower case, punctuation as spaces, no articles, single spaces: TriviaQA's rule (Joshi et al. 2017)."""
    text = text.replace("_", " ").lower().translate(_PUNCTUATION_TO_SPACES)
    return " ".join(_ARTICLES.sub(" ", text).split())


def lm_eval_correct(text: str, question: Question, style: LmEvalPrompting) -> dict[str, bool]:
    """Right when the answer equals one of the right answers, after the same clean-up of both."""
    given = _cut(text, style.ends)
    found = {name: extract_answer(given, rule) for name, rule in style.extract.items()} or {"exact_match": given}
    right = {_clean(answer, style) for answer in (question.answer, *question.aliases)}
    return {name: _clean(one.strip() if style.strip else one, style) in right for name, one in found.items()}


def extract_answer(text: str, rule: Extract) -> str:
    """One of the pattern's matches; of a match with groups, the first group that is not empty."""
    matches = list(re.finditer(rule.pattern, text))
    try:
        match = matches[rule.match]
    except IndexError:
        return rule.otherwise
    if not match.re.groups:
        return match[0].strip()
    if match.re.groups == 1:
        return (match[1] or "").strip()
    return next((group for group in match.groups() if group), rule.otherwise).strip()


def _clean(text: str, style: LmEvalPrompting) -> str:
    for pattern in style.ignore:
        text = re.sub(pattern, "", text)
    if style.ignore_case:
        text = text.lower()
    return text.translate(_PUNCTUATION) if style.ignore_punctuation else text


def _cut(text: str, stops: list[str]) -> str:
    """The text before the first of `stops`, should the generator have gone on."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
