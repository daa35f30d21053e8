"""Aggregations of lm-evaluation-harness 0.4.13 over the documents of a task, with standard errors.

The error of a mean is the sample deviation over the square root of n, as there. For medians, F1, Matthews' correlation, BLEU,
chrF and TER the harness draws documents anew and takes the deviation of the results; here it is that of the first 1,000 of
its 100,000 draws, and of all of its 100 for the last three. It draws anew for perplexities too, or gives no error, and none
for the Brier score; here these have the first-order error of a ratio of sums (report/metrics.py).
"""

from __future__ import annotations

import importlib.util
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval_tasks.code import load_function
from llmtrain.eval.lm_eval_tasks.yaml_file import Function
from llmtrain.eval.report.metrics import Estimate, WeightedSum, estimate

NUMBER, LABELS, TEXTS, WEIGHTED, PROBABILITIES, LIKELIHOODS = (
    "a number",
    "a pair of labels",
    "a pair of texts",
    "a sum and its weight",
    "a label and probabilities",
    "a label and log-likelihoods",
)
"""Kinds of what one document gives to a metric."""

_DRAWS, _DRAWS_OF_TEXTS = 1000, 100


def nanmean(items: Sequence[float]) -> float:
    numbers = [item for item in items if not math.isnan(item)]
    return sum(numbers) / len(numbers) if numbers else math.nan


def f1(items: Sequence[tuple[int, int]]) -> float:
    """F1 of class 1 from (label, prediction) pairs of two classes."""
    counts = Counter(items)
    classes = {one for pair in counts for one in pair}
    if len(classes) > 1 and not classes <= {0, 1}:
        raise EvalError(f"f1 is of two classes, 0 and 1; the labels here are {', '.join(map(str, sorted(classes)))}")
    wrong = sum(count for (gold, chosen), count in counts.items() if gold != chosen)
    return 2 * counts[1, 1] / (2 * counts[1, 1] + wrong) if counts[1, 1] else 0.0


def matthews_corrcoef(items: Sequence[tuple[int, int]]) -> float:
    """Matthews' correlation of labels and predictions, of any number of classes (Gorodkin 2004); 0 where it is undefined."""
    golds, chosen = Counter(gold for gold, _ in items), Counter(one for _, one in items)
    n, right = len(items), sum(gold == one for gold, one in items)
    covariance = right * n - sum(golds[one] * chosen[one] for one in golds)
    spread = (n * n - sum(count**2 for count in golds.values())) * (n * n - sum(count**2 for count in chosen.values()))
    return covariance / math.sqrt(spread) if spread else 0.0


def _brier(gold: int, probabilities: Any) -> float:
    if not 0 <= gold < len(probabilities):
        raise EvalError("brier_score: a document's right choice is none of its choices")
    return float(np.sum((np.asarray(probabilities) - np.eye(len(probabilities))[gold]) ** 2))


def brier_score(items: Sequence[tuple[int, Any]]) -> float:
    if len({len(probabilities) for _, probabilities in items}) > 1:
        raise EvalError("brier_score: the documents differ in their number of choices")
    return sum(_brier(*item) for item in items) / len(items)


@dataclass(frozen=True)
class Translation:
    """Corpus score by sacrebleu of (right answer or answers, answer) pairs. metric: name of its class."""

    metric: str
    word_order: int | None = None

    def __call__(self, items: Sequence[tuple[Any, Any]]) -> float:
        return self._metric().corpus_score(*self._columns(items)).score

    def errors(self, items: Sequence[tuple[Any, Any]]) -> float | None:
        """Deviation of the score over draws of documents, from each document's counts of n-grams or edits."""
        metric = self._metric()
        extract, compute = (
            getattr(metric, f"_{name}", None) for name in ("extract_corpus_statistics", "aggregate_and_compute")
        )
        if extract is None or compute is None:
            return None
        return _deviation(lambda drawn: compute(drawn).score, extract(*self._columns(items)), _DRAWS_OF_TEXTS)

    def _metric(self) -> Any:
        from sacrebleu import metrics

        made = getattr(metrics, self.metric)
        return made() if self.word_order is None else made(word_order=self.word_order)

    @staticmethod
    def _columns(items: Sequence[tuple[Any, Any]]) -> tuple[list[str], list[Any]]:
        references = [[gold] if isinstance(gold, str) else list(gold) for gold, _ in items]
        answers = [answer if isinstance(answer, str) else answer[0] for _, answer in items]
        return answers, list(zip(*references, strict=False))


def _weighted_mean(items: Sequence[WeightedSum]) -> float:
    return sum(total for total, _ in items) / sum(weight for _, weight in items)


AGGREGATIONS: dict[str, Callable[[Sequence[Any]], float]] = {
    "mean": lambda items: sum(items) / len(items),
    "nanmean": nanmean,
    "median": lambda items: sorted(items)[len(items) // 2],
    "perplexity": lambda items: math.exp(-sum(items) / len(items)),
    "weighted_perplexity": lambda items: math.exp(-_weighted_mean(items)),
    "bits_per_byte": lambda items: -_weighted_mean(items) / math.log(2),
    "f1": f1,
    "matthews_corrcoef": matthews_corrcoef,
    "brier_score": brier_score,
    "bleu": Translation("BLEU"),
    "chrf": Translation("CHRF"),
    "chrf++": Translation("CHRF", 2),
    "ter": Translation("TER"),
    "bypass": lambda items: 999.0,
}

_KINDS = {
    **dict.fromkeys(("mean", "nanmean", "median", "perplexity"), NUMBER),
    **dict.fromkeys(("weighted_perplexity", "bits_per_byte"), WEIGHTED),
    **dict.fromkeys(("f1", "matthews_corrcoef"), LABELS),
    **dict.fromkeys(("bleu", "chrf", "chrf++", "ter"), TEXTS),
    "brier_score": PROBABILITIES,
}


def takes(aggregation: str, kind: str) -> bool:
    """True if the aggregation can be taken of what documents give."""
    return _KINDS.get(aggregation, kind) == kind


def check_library(what: str, aggregation: str) -> None:
    """Check that the library of an aggregation is installed; raises EvalError that begins with `what`."""
    if isinstance(AGGREGATIONS.get(aggregation), Translation) and importlib.util.find_spec("sacrebleu") is None:
        raise EvalError(f"{what} needs the library sacrebleu: pip install sacrebleu")


def weighted_sum(aggregation: str | Function, value: Any) -> WeightedSum | None:
    """One document's part of an aggregation that is a function of a mean; None for others."""
    kind = None if isinstance(aggregation, Function) else _KINDS.get(aggregation)
    if kind == NUMBER and aggregation != "median" and not math.isnan(value):
        return float(value), 1.0
    if kind == WEIGHTED:
        return float(value[0]), float(value[1])
    return (_brier(*value), 1.0) if kind == PROBABILITIES else None


def aggregate(name: str, aggregation: str | Function, items: Sequence[Any]) -> Estimate:
    """Metric over documents. items: what each gives. Raises EvalError with the metric's name for what cannot be aggregated."""
    try:
        if isinstance(aggregation, Function):
            return Estimate(float(load_function(aggregation)(items)), None)
        return _aggregate(aggregation, items)
    except EvalError:
        raise
    except Exception as error:  # values of a task's own code may be anything
        reason = str(error) or type(error).__name__
        shown = aggregation if isinstance(aggregation, str) else aggregation.reference
        raise EvalError(f"{name}: {shown} cannot be taken of what its documents give: {reason}") from None


def _aggregate(aggregation: str, items: Sequence[Any]) -> Estimate:
    kind, function = _KINDS.get(aggregation), AGGREGATIONS[aggregation]
    if aggregation in ("mean", "brier_score"):
        numbers = [float(item) if aggregation == "mean" else _brier(*item) for item in items]
        error = statistics.stdev(numbers) / math.sqrt(len(numbers)) if len(numbers) > 1 else None
        return Estimate(float(function(items)), error)
    if aggregation == "perplexity" or kind == WEIGHTED:
        unit = "bits_per_byte" if aggregation == "bits_per_byte" else "perplexity"
        sums = [weighted_sum(aggregation, item) for item in items]
        return estimate(unit, [one for one in sums if one is not None])
    value = float(function(items))
    if aggregation == "bypass" or len(items) < 2:
        return Estimate(value, None)
    error = function.errors(items) if isinstance(function, Translation) else _deviation(function, items, _DRAWS)
    return Estimate(value, error)


def _deviation(function: Callable[[Sequence[Any]], float], items: Sequence[Any], draws: int) -> float:
    rng = random.Random(0)
    return statistics.stdev(float(function(rng.choices(items, k=len(items)))) for _ in range(draws))
