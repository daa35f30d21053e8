"""Results as a long table: one row per model, task, category and metric. Imports no torch."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

from llmtrain.eval.report.gauntlet import Gauntlet, GauntletScores
from llmtrain.eval.report.metrics import Metrics

COLUMNS = ("model", "task", "shots", "category", "metric", "value", "stderr", "n")
"""n: number of documents. category: empty in rows of a whole task."""

Row = list[Any]


def task_rows(model: str, task: str, shots: int, metrics: Metrics) -> Iterator[Row]:
    """All metrics of a task, the headline first, then those of its categories."""
    sizes = Counter(one.category for one in metrics.per_document)
    parts = [("", metrics.values, metrics.documents)]
    parts += [(name, values, sizes[name]) for name, values in metrics.categories.items()]
    for category, values, count in parts:
        for metric, estimate in sorted(values.items(), key=lambda pair: pair[0] != metrics.headline):
            yield [model, task, shots, category, metric, estimate.value, estimate.stderr, count]


def gauntlet_rows(model: str, gauntlet: Gauntlet, scores: GauntletScores) -> Iterator[Row]:
    """Averages and categories of a gauntlet, as categories of a task `gauntlet NAME`."""
    sizes: Counter[str] = Counter()
    for row in scores.rows:
        sizes[row.category] += row.metrics.documents
    for name, members in gauntlet.named_averages().items():
        sizes[name] = sum(sizes[member] for member in members)
    for name, value in (scores.averages | scores.categories).items():
        yield [model, f"gauntlet {gauntlet.name}", None, name, "score", value.value, value.stderr, sizes[name]]
