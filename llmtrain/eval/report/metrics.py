"""Metrics over documents: each is a function of a weighted mean, with a standard error."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

WeightedSum = tuple[float, float]
"""(sum, weight) of one document: (1.0, 1.0) for a hit, (log-likelihood in nats, tokens) for perplexity per token."""


@dataclass(frozen=True)
class Estimate:
    """Value of a metric. stderr: None where there is only one document, or one in a category."""

    value: float
    stderr: float | None


@dataclass(frozen=True)
class DocumentMetrics:
    """Contribution of one document to each metric, and the details that are reported of it."""

    document: int
    category: str | None
    values: Mapping[str, WeightedSum]
    details: Mapping[str, Any]
    truncated: int
    """Number of requests whose context was cut to fit the window."""


@dataclass(frozen=True)
class Metrics:
    """Metrics of one task under one convention; `headline` names the one to quote.

    documents, requests: their numbers. truncated: number of requests whose context was cut to fit the model's window. categories:
    the metrics of each category. lower_is_better: names of those that fall as a model improves, perplexities aside.
    """

    headline: str
    values: dict[str, Estimate]
    documents: int
    requests: int
    truncated: int
    categories: dict[str, dict[str, Estimate]] = field(default_factory=dict)
    per_document: list[DocumentMetrics] = field(default_factory=list, repr=False)
    lower_is_better: Sequence[str] = ()

    @property
    def score(self) -> Estimate:
        return self.values[self.headline]


@dataclass(frozen=True)
class Result:
    """One cell of the table.

    path: the model's folder. title: the task with its shots. asked: documents for which the model was run; responses for the others
    were stored. seconds: time of these runs. skipped: reasons of documents that were left out, by location. style: the chat
    template and its settings (PromptStyle.as_json); None: plain text. task_settings: Task.described.
    """

    model: str
    path: str
    task: str
    shots: int
    title: str
    convention: str
    dtype: str
    metrics: Metrics
    seconds: float
    asked: int
    skipped: Mapping[str, str] = field(default_factory=dict)
    style: Mapping[str, Any] | None = None
    task_settings: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Failure:
    """Task that was not evaluated, by the models of these titles. title: the task with its shots."""

    title: str
    reason: str
    models: list[str]


def is_perplexity(metric: str) -> bool:
    """True for perplexities and bits per byte, of which lower values are better. metric: also with a filter's name."""
    name = metric.partition(",")[0]
    return name.endswith("perplexity") or name == "bits_per_byte"


def is_share(metric: str, *values: float) -> bool:
    """True for metrics that are shares of 1, which are shown in percent: not perplexities, and not scores up to 100, which the
    values tell of a task's own metric."""
    name = metric.partition(",")[0]
    scores = ("bleu", "chrf", "chrf++", "ter", "bypass")
    return not is_perplexity(metric) and name not in scores and all(value <= 1 for value in values)


def estimate(metric: str, items: Sequence[WeightedSum]) -> Estimate:
    """Weighted mean over documents, converted to the metric's unit.

    Standard errors are those of a ratio of sums (Cochran 1977, section 2.11), which for equal weights is the sample
    deviation over the square root of n; through exp and log by their derivative.
    """
    count, weight = len(items), sum(item[1] for item in items)
    mean = sum(item[0] for item in items) / weight
    stderr = None
    if count > 1:
        squares = sum((value - mean * share) ** 2 for value, share in items)
        stderr = math.sqrt(squares * count / (count - 1)) / weight
    if metric == "bits_per_byte":
        return Estimate(-mean / math.log(2), stderr and stderr / math.log(2))
    if is_perplexity(metric):
        value = math.exp(min(-mean, 700.0))  # an untrained model may be worse than a float can say
        return Estimate(value, stderr and stderr * value)
    return Estimate(mean, stderr)


def macro_average(parts: Sequence[Estimate]) -> Estimate:
    """Unweighted mean over categories (LLM Foundry)."""
    value = sum(part.value for part in parts) / len(parts)
    errors = [part.stderr for part in parts if part.stderr is not None]
    known = len(errors) == len(parts)
    return Estimate(value, math.sqrt(sum(error**2 for error in errors)) / len(parts) if known else None)


def pooled(whole: Estimate, parts: Sequence[tuple[Estimate, int]]) -> Estimate:
    """Mean of all documents with the pooled standard error of categories (lm-evaluation-harness's groups).

    parts: each category's estimate and its documents.
    """
    if any(part.stderr is None for part, _ in parts):
        return Estimate(whole.value, None)
    count = sum(size for _, size in parts)
    squares = sum((size - 1) * size * (part.stderr or 0.0) ** 2 for part, size in parts)
    return Estimate(whole.value, math.sqrt(squares / (count - len(parts)) / count))


def aggregate(
    per_document: Sequence[DocumentMetrics], metrics: Sequence[str], *, macro: bool
) -> tuple[dict[str, Estimate], dict]:
    """(metric -> estimate, category -> metric -> estimate). macro: average over categories, not over documents."""
    groups: dict[str, list[DocumentMetrics]] = {}
    for one in per_document:
        if one.category is not None:
            groups.setdefault(one.category, []).append(one)

    def of(metric: str, some: Sequence[DocumentMetrics]) -> Estimate:
        return estimate(metric, [one.values[metric] for one in some])

    categories = {name: {metric: of(metric, groups[name]) for metric in metrics} for name in sorted(groups)}
    values: dict[str, Estimate] = {}
    for metric in metrics:
        values[metric] = of(metric, per_document)
        if macro and categories:
            values[metric] = macro_average([parts[metric] for parts in categories.values()])
        elif len(categories) > 1 and not is_perplexity(metric):
            parts = [(categories[name][metric], len(groups[name])) for name in categories]
            values[metric] = pooled(values[metric], parts)
    return values, categories
