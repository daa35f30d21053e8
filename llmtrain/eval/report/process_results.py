"""Metrics of one document, computed from the responses to its requests."""

import re
import string
from collections.abc import Sequence
from typing import Any

from llmtrain.eval.prompts.requests import GeneratedText, Loglikelihood
from llmtrain.eval.report.document_scores import Texts, describe
from llmtrain.eval.report.filters import apply_filters
from llmtrain.eval.report.metrics import DocumentMetrics, WeightedSum
from llmtrain.eval.tasks.config import Convention
from llmtrain.eval.tasks.documents import Choices, Content, Continuation, Document, Instructed, Question, Schema, Text
from llmtrain.eval.tasks.sections import ConventionSettings, FoundryPrompting, LmEvalPrompting


def process_results(
    document: Document, results: Sequence[Loglikelihood] | Sequence[GeneratedText], settings: ConventionSettings
) -> DocumentMetrics:
    """Metrics of a document. results: responses to its requests, in the order of their options."""
    values, details = _values(document, results, settings)
    place: dict[str, Any] = {"document": document.index, "where": document.where}
    if document.category is not None:
        place["category"] = document.category
    details = place | describe(_texts(document.content), document.preamble) | details
    return DocumentMetrics(
        document.index, document.category, values, details, sum(one.truncated > 0 for one in results)
    )


def _values(document: Document, results: Sequence, settings: ConventionSettings) -> tuple[dict[str, WeightedSum], dict]:
    content = document.content
    if isinstance(content, Question):
        [generated] = results
        right = (
            foundry_exact_match(generated.text, content, settings)
            if isinstance(settings, FoundryPrompting)
            else lm_eval_exact_match(generated.text, content, settings, document.category)
        )
        hits = {name: (float(hit), 1.0) for name, hit in right.items()}
        return hits, {"text": generated.text, "correct": right}
    if isinstance(content, Instructed):
        [generated] = results
        return _instruction_metrics(content, generated.text)
    details = {
        "log_likelihoods": [one.log_likelihood for one in results],
        "tokens": [one.tokens for one in results],
        "greedy": [one.greedy for one in results],
    }
    match content:
        case Choices() | Schema():
            scores = choice_scores(content, results, "foundry" if isinstance(settings, FoundryPrompting) else "lm-eval")
            chosen = {name: max(range(len(some)), key=some.__getitem__) for name, some in scores.items()}
            hits = {f"acc_{name}": (float(number == content.gold), 1.0) for name, number in chosen.items()}
            return hits, details | {"gold": content.gold, "chosen": chosen}
        case Continuation():
            [one] = results
            likelihood = one.log_likelihood
            return {
                "acc": (float(one.greedy), 1.0),
                "perplexity": (likelihood, 1.0),
                "token_perplexity": (likelihood, float(one.tokens)),
            }, details
        case Text():
            text = content.original or content.text
            likelihood = sum(one.log_likelihood for one in results)
            counts = {
                "token_perplexity": sum(one.tokens for one in results),
                "word_perplexity": len(re.split(r"\s+", text)),
                "byte_perplexity": len(text.encode()),
                "bits_per_byte": len(text.encode()),
            }
            return {name: (likelihood, float(count)) for name, count in counts.items()}, details


def _instruction_metrics(content: Instructed, text: str) -> tuple[dict[str, WeightedSum], dict]:
    """Metrics of IFEval: all instructions of a prompt together count once, or each of them, checked strictly or loosely."""
    strict = [one.is_followed(text) for one in content.instructions]
    loose = [one.is_followed_loosely(text) for one in content.instructions]
    values: dict[str, WeightedSum] = {}
    for name, followed in (("strict", strict), ("loose", loose)):
        values[f"prompt_level_{name}_acc"] = (float(all(followed)), 1.0)
        values[f"inst_level_{name}_acc"] = (float(sum(followed)), float(len(followed)))
    followed = {"strict": strict, "loose": loose, "instructions": [one.name for one in content.instructions]}
    return values, {"text": text, **followed}


def _texts(content: Content) -> Texts:
    """Texts of a document that are asked, and that are right."""
    match content:
        case Choices(query, choices):
            return {"prompt": query, "choices": choices, "right": choices[content.gold]}
        case Schema(contexts, continuation):
            return {"prompt": continuation, "choices": contexts, "right": contexts[content.gold]}
        case Continuation(context, continuation):
            return {"prompt": context, "right": continuation}
        case Question():
            return {"prompt": content.context, "right": content.answer, "aliases": content.aliases}
        case Text(text):
            return {"prompt": text}
        case Instructed():
            return {"prompt": content.context, "right": ", ".join(one.name for one in content.instructions)}


def choice_scores(
    content: Choices | Schema, results: Sequence[Loglikelihood], convention: Convention
) -> dict[str, list[float]]:
    """Scores of all alternatives by normalisation; the alternative with the highest score is chosen, the first of equals.

    results: log-likelihoods of the alternatives, then (PMI) of the choices after the premise. Lengths are those of the choice
    without its delimiter. The alternatives of a schema have one continuation, whose length changes nothing; in lm-eval's
    convention they are divided by the lengths of the context options, as lm-evaluation-harness does.
    """
    if isinstance(content, Choices):
        texts = content.choices
    elif convention == "lm-eval":
        texts = content.contexts
    else:
        texts = (content.continuation,) * len(content.contexts)
    count = len(texts)
    assert len(results) in (count, 2 * count), f"{len(results)} results for {count} alternatives"
    likelihoods = [one.log_likelihood for one in results]
    scores = {
        "sum": likelihoods[:count],
        "per_token": [one.log_likelihood / one.tokens for one in results[:count]],
        "per_char": [one / len(text) for one, text in zip(likelihoods, texts, strict=False)],
        "per_byte": [one / len(text.encode()) for one, text in zip(likelihoods, texts, strict=False)],
    }
    if len(results) > count:
        scores["pmi"] = [one - alone for one, alone in zip(likelihoods, likelihoods[count:], strict=False)]
    return scores


_PUNCTUATION = str.maketrans("", "", string.punctuation)
_PUNCTUATION_TO_SPACES = {ord(mark): " " for mark in string.punctuation + "‘’´`"}
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def foundry_exact_match(text: str, question: Question, settings: FoundryPrompting) -> dict[str, bool]:
    """exact_match is True if the generated answer begins with a right one.

    As in LLM Foundry, an alias that is empty after normalisation ("The") makes every answer right; one of its 3,000
    TriviaQA questions has such an alias.
    """
    given = until_stop(text, settings.ends)
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
    given = until_stop(text, settings.ends)
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


def until_stop(text: str, stops: Sequence[str]) -> str:
    """Text before the first of `stops`."""
    for stop in stops:
        text = text.split(stop)[0]
    return text
