"""Metrics over the documents of a lm-evaluation-harness task: lm_eval's aggregations, with standard errors.

The error of a mean is lm_eval's. Where it draws documents anew (100,000 times, in processes of its own), it is here the
deviation of the first 1,000 of these draws, and of all of its 100 for BLEU, chrF and TER, from each document's counts. For
perplexities and the Brier score, where it draws too or gives none, it is of first order (report/metrics.py).
"""

import math
import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from lm_eval.api import metrics
from lm_eval.api.group import Group as LmEvalGroup
from lm_eval.config.group import AggMetricConfig

from llmtrain.errors import first_line
from llmtrain.eval.errors import EvalError
from llmtrain.eval.lm_eval.groups import Aggregate, Group, GroupMetric
from llmtrain.eval.report.metrics import Estimate, Metrics, WeightedSum, estimate

Aggregation = Callable[[Sequence[Any]], Any]

_DRAWS, _DRAWS_OF_TEXTS = 1000, 100
_DRAWN = (metrics.median, metrics.nanmean, metrics.f1_score, metrics.matthews_corrcoef)
_TEXTS: dict[Aggregation, tuple[str, dict[str, Any]]] = {
    metrics.bleu: ("BLEU", {}),
    metrics.chrf: ("CHRF", {}),
    metrics.chrfpp: ("CHRF", {"word_order": 2}),
    metrics.ter: ("TER", {}),
}
LABELS = (metrics.f1_score, metrics.matthews_corrcoef, metrics.brier_score)
"""Aggregations of labels, which some sets of labels make impossible."""


def weighted_sum(function: Aggregation, value: Any) -> WeightedSum | None:
    """One document's part of an aggregation that is a function of a mean; None for others."""
    if function in (metrics.weighted_perplexity, metrics.bits_per_byte):
        return float(value[0]), float(value[1])
    if function is metrics.brier_score:
        return float(function([value])), 1.0
    if function in (metrics.mean, metrics.nanmean, metrics.perplexity):
        return None if math.isnan(number := float(value)) else (number, 1.0)
    return None


def aggregate(name: str, function: Aggregation, items: Sequence[Any]) -> Estimate:
    """Metric over documents. items: what each gives. Raises EvalError with the metric's name for what cannot be aggregated."""
    try:
        return Estimate(float(function(items)), _error(function, items))
    except EvalError:
        raise
    except Exception as error:  # values of a task's own code may be anything
        shown = getattr(function, "__name__", str(function))
        raise EvalError(f"{name}: {shown} cannot be taken of what its documents give: {first_line(error)}") from None


def _error(function: Aggregation, items: Sequence[Any]) -> float | None:
    if len(items) < 2:
        return None
    if function is metrics.mean:
        return float(metrics.mean_stderr(items))
    if function in (metrics.perplexity, metrics.weighted_perplexity, metrics.bits_per_byte, metrics.brier_score):
        unit = function.__name__ if function in (metrics.brier_score, metrics.bits_per_byte) else "perplexity"
        sums = [weighted_sum(function, item) for item in items]
        return estimate(unit, [one for one in sums if one is not None]).stderr
    if function in _TEXTS:
        return _error_of_texts(function, items)
    return _deviation(function, items, _DRAWS) if function in _DRAWN else None


def _error_of_texts(function: Aggregation, items: Sequence[Any]) -> float | None:
    """Deviation of a corpus score over draws of documents. lm_eval's would take minutes, which counts all texts for each draw."""
    from sacrebleu import metrics as classes

    name, options = _TEXTS[function]
    metric = getattr(classes, name)(**options)
    extract, compute = (
        getattr(metric, f"_{part}", None) for part in ("extract_corpus_statistics", "aggregate_and_compute")
    )
    if extract is None or compute is None:
        return None
    references = [[gold] if isinstance(gold, str) else list(gold) for gold, _ in items]
    answers = [answer if isinstance(answer, str) else answer[0] for _, answer in items]
    counts = extract(answers, list(zip(*references, strict=False)))
    return _deviation(lambda drawn: compute(drawn).score, counts, _DRAWS_OF_TEXTS)


def _deviation(function: Aggregation, items: Sequence[Any], draws: int) -> float:
    rng = random.Random(0)
    return statistics.stdev(float(function(rng.choices(items, k=len(items)))) for _ in range(draws))


# Groups


class _Members(LmEvalGroup):
    """lm_eval's group, of tasks by their names alone."""

    def __init__(self, names: Sequence[str], aggregates: Sequence[Aggregate]):
        listed = [
            AggMetricConfig(
                one.metric, None if one.filters is None else list(one.filters), weight_by_size=one.weight_by_size
            )
            for one in aggregates
        ]
        super().__init__("", aggregate_metric_list=listed)
        self._names = names

    def get_all_tasks(self, recursive: bool = True) -> list[Any]:
        return [SimpleNamespace(task_name=name) for name in self._names]


def aggregate_group(group: Group, tasks: Mapping[str, Metrics]) -> dict[str, GroupMetric]:
    """Metrics of a group from those of its tasks, by name, as lm_eval computes them.

    A mean over documents (weight_by_size) has the pooled standard error, a mean over tasks that of a mean of independent
    parts; None where a task has none. Metrics that no task has are left out.
    """
    names = [leaf.name for leaf in group.leaves()]
    rows: dict[str, Any] = {name: {"sample_len": one.documents} for name, one in tasks.items()}
    for name, one in tasks.items():
        for title, value in one.values.items():
            metric, _, chain = title.partition(",")
            rows[name][f"{metric},{chain or 'none'}"] = value.value
            rows[name][f"{metric}_stderr,{chain or 'none'}"] = "N/A" if value.stderr is None else value.stderr
    found: Any = _Members(names, group.aggregates).aggregate(rows)
    made: dict[str, GroupMetric] = {}
    for key, documents in found.get("sample_count", {}).items():
        metric, _, chain = key.partition(",")
        error = found[f"{metric}_stderr,{chain}"]
        estimated = Estimate(float(found[key]), None if error == "N/A" else float(error))
        missing = [name for name in dict.fromkeys(names) if key not in rows.get(name, ())]
        made[metric if chain == "none" else key] = GroupMetric(estimated, documents, missing)
    return made
