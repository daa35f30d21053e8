"""From the log likelihoods of one document's requests to everything it adds to the metrics."""

from __future__ import annotations

import re
from collections.abc import Sequence

from llmtrain.eval.report.answers import foundry_correct, lm_eval_correct
from llmtrain.eval.report.metrics import Judged, Weighted
from llmtrain.eval.scoring.request import Generated, Scored
from llmtrain.eval.tasks.config import Convention
from llmtrain.eval.tasks.documents import Choices, Continuation, Document, Question, Schema, Text
from llmtrain.eval.tasks.sections import FoundryPrompting, LmEvalPrompting

Style = FoundryPrompting | LmEvalPrompting


def judge(document: Document, results: Sequence[Scored] | Sequence[Generated], style: Style) -> Judged:
    """results: of the document's requests, in the order of their options."""
    values, details = _judge(document, results, style)
    details = {"document": document.index, "where": document.where, **details}
    if document.category is not None:
        details["category"] = document.category
    return Judged(document.index, document.category, values, details, sum(one.truncated > 0 for one in results))


def _judge(document: Document, results: Sequence, style: Style) -> tuple[dict[str, Weighted], dict]:
    content = document.content
    if isinstance(content, Question):
        [generated] = results
        right = (
            foundry_correct(generated.text, content, style)
            if isinstance(style, FoundryPrompting)
            else lm_eval_correct(generated.text, content, style)
        )
        hits = {name: (float(hit), 1.0) for name, hit in right.items()}
        return hits, {"text": generated.text, "answer": content.answer, "correct": right}
    details = {
        "log_likelihoods": [one.log_likelihood for one in results],
        "tokens": [one.tokens for one in results],
        "greedy": [one.greedy for one in results],
    }
    match content:
        case Choices() | Schema():
            scores = choice_scores(content, results, "foundry" if isinstance(style, FoundryPrompting) else "lm-eval")
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
        case Text(text):
            likelihood = sum(one.log_likelihood for one in results)
            counts = {
                "token_perplexity": sum(one.tokens for one in results),
                "word_perplexity": len(re.split(r"\s+", text)),
                "byte_perplexity": len(text.encode()),
                "bits_per_byte": len(text.encode()),
            }
            return {name: (likelihood, float(count)) for name, count in counts.items()}, details


def choice_scores(
    content: Choices | Schema, results: Sequence[Scored], convention: Convention
) -> dict[str, list[float]]:
    """Score of every alternative, by name of the normalisation; the highest wins, the first of equals.

    results: of the alternatives, then (PMI) of the choices after the premise. Lengths are those of the choice without
    its delimiter. Of a schema's only continuation, they change nothing, but lm-evaluation-harness divides by the
    lengths of the context options, and so does its convention here.
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
