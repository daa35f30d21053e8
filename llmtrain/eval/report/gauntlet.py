"""Gauntlets: averages over categories of benchmarks, counted from their random baselines.

As in LLM Foundry's Eval Gauntlet: score = (accuracy - baseline) / (1 - baseline); a category is the weighted mean of its
benchmarks, an average the plain mean of its categories. Unlike in LLM Foundry, a benchmark without a result is an error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from llmtrain.config.base import Probability, Problem, Section
from llmtrain.config.report import ConfigError, suggest
from llmtrain.config.texts import PathText
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.metrics import Estimate, Metrics, is_share
from llmtrain.eval.tasks.load import find_yaml, read_section


class Benchmark(Section):
    """One task with a number of shots."""

    task: PathText
    """Name of a shipped task, or path of a task's YAML relative to the gauntlet's."""
    shots: Annotated[int, Field(ge=0, le=1000)]
    """Few-shot examples."""
    baseline: Probability
    """Accuracy of random guessing."""
    metric: str | None = None
    """Metric that counts; default: the task's headline."""


class Gauntlet(Section):
    """Categories of benchmarks, and averages of categories."""

    name: str
    """Name in results."""
    about: str = ""
    """One line for people."""
    weighting: Literal["equal", "documents", "log_documents"] = "equal"
    """Weight of a benchmark in its category: 1, its number of documents, or the base-2 logarithm of it (at least 1)."""
    subtract_baseline: bool = True
    """Subtract the random baseline."""
    rescale: bool = True
    """Divide by 1 - baseline, so that 1 is perfect."""
    categories: dict[str, Annotated[list[Benchmark], Field(min_length=1)]]
    """Benchmarks by category."""
    averages: dict[str, Annotated[list[str], Field(min_length=1)]] = {}
    """Named averages of categories. Default: `average`, of all."""

    def problems(self) -> Iterator[Problem]:
        if self.rescale and not self.subtract_baseline:
            yield self.problem_at("rescale", "needs subtract_baseline: true, or 1 would not be perfect")
        if not self.categories:
            yield Problem("categories", None, "a gauntlet needs at least one category")
        for name, members in self.averages.items():
            if name in self.categories:
                yield Problem(f"averages.{name}", None, "is the name of a category too; rename the average")
            for member in members:
                if member not in self.categories:
                    yield Problem(f"averages.{name}", member, suggest(member, self.categories, "categories are"))
        for category, benchmarks in self.categories.items():
            keys = [(one.task, one.shots) for one in benchmarks]
            for task, shots in sorted({key for key in keys if keys.count(key) > 1}):
                yield Problem(f"categories.{category}", task, f"is there twice with {shots} shots; keep one")

    def benchmarks(self) -> list[tuple[str, int]]:
        """Distinct pairs (task, shots) of all benchmarks."""
        return list(dict.fromkeys((one.task, one.shots) for group in self.categories.values() for one in group))

    def named_averages(self) -> dict[str, list[str]]:
        """Categories of each average."""
        return self.averages or {"average": list(self.categories)}


@dataclass(frozen=True)
class Row:
    """Result of one benchmark. metric: the one that counts; score: (metric - baseline) / scale; weight: in its category."""

    category: str
    benchmark: Benchmark
    metrics: Metrics
    metric: str
    baseline: float
    scale: float
    score: Estimate
    weight: float


@dataclass(frozen=True)
class GauntletScores:
    """Scores of one model: its benchmarks, categories and averages."""

    rows: list[Row]
    categories: dict[str, Estimate]
    averages: dict[str, Estimate]


def load_gauntlet(name: str | Path) -> Gauntlet:
    """Load a gauntlet from a YAML, or a shipped one by name; its task paths become relative to the current folder.

    Raises ConfigError that lists all errors of the YAML, among them tasks that are not there, or EvalError for an unknown name.
    """
    file = find_yaml(name, "gauntlets")
    gauntlet = read_section(file, Gauntlet)
    found: dict[str, str] = {}
    problems: list[Problem] = []
    for category, group in gauntlet.categories.items():
        for number, benchmark in enumerate(group):
            beside = file.parent / benchmark.task
            try:
                found[benchmark.task] = str(beside) if beside.is_file() else benchmark.task
                if not find_yaml(found[benchmark.task], "tasks").is_file():
                    raise EvalError(f"there is no file {beside}")
            except EvalError as error:
                problems.append(Problem(f"categories.{category}.{number}.task", None, str(error)))
    if problems:
        raise ConfigError(str(file), problems)
    groups = {
        category: [one.model_copy(update={"task": found[one.task]}) for one in group]
        for category, group in gauntlet.categories.items()
    }
    return gauntlet.model_copy(update={"categories": groups})


def gauntlet_scores(gauntlet: Gauntlet, results: Mapping[tuple[str, int], Metrics]) -> GauntletScores:
    """Scores of a gauntlet. results: metrics by (task, shots) as in `gauntlet.benchmarks()`.

    Raises EvalError that lists every benchmark without a result, or with a metric that was not measured.
    """
    missing = [f"{task} ({shots}-shot)" for task, shots in gauntlet.benchmarks() if (task, shots) not in results]
    if missing:
        raise EvalError(f"gauntlet {gauntlet.name}: no results for {', '.join(missing)}; it needs every benchmark")
    rows = [
        _row(gauntlet, category, benchmark, results[benchmark.task, benchmark.shots])
        for category, group in gauntlet.categories.items()
        for benchmark in group
    ]
    categories = {
        category: _mean([(row.score, row.weight) for row in rows if row.category == category])
        for category in gauntlet.categories
    }
    averages = {
        name: _mean([(categories[member], 1.0) for member in members])
        for name, members in gauntlet.named_averages().items()
    }
    return GauntletScores(rows, categories, averages)


_HARNESS_NAMES = {
    "acc": "acc_sum",
    "acc_norm": "acc_per_char",
    "acc_bytes": "acc_per_byte",
    "acc_mutual_info": "acc_pmi",
}
"""Accuracies by their names in lm-evaluation-harness."""


def check_metric(gauntlet: Gauntlet, benchmark: Benchmark, headline: str, measured: Sequence[str]) -> str:
    """Metric of a benchmark: its own, or else the task's headline. Raises EvalError for a metric that is no accuracy, or is not
    measured."""
    metric = benchmark.metric or headline
    allowed = [name for name in measured if is_share(name)]
    if metric in allowed:
        return metric
    if not allowed:
        hint = "it measures no accuracy, of which a gauntlet is an average; leave it out"
    elif _HARNESS_NAMES.get(metric) in allowed:
        hint = f"what lm-evaluation-harness calls {metric} is {_HARNESS_NAMES[metric]} here"
    else:
        hint = suggest(metric, allowed)
    raise EvalError(f"gauntlet {gauntlet.name}: {benchmark.task} has no accuracy '{metric}'; {hint}")


def _row(gauntlet: Gauntlet, category: str, benchmark: Benchmark, metrics: Metrics) -> Row:
    metric = check_metric(gauntlet, benchmark, metrics.headline, list(metrics.values))
    measured = metrics.values[metric]
    low = benchmark.baseline if gauntlet.subtract_baseline else 0.0
    scale = 1.0 - low if gauntlet.rescale else 1.0
    stderr = None if measured.stderr is None else measured.stderr / scale
    score = Estimate((measured.value - low) / scale, stderr)
    weights = {
        "equal": 1.0,
        "documents": float(metrics.documents),
        "log_documents": max(math.log2(metrics.documents), 1.0),
    }
    return Row(category, benchmark, metrics, metric, low, scale, score, weights[gauntlet.weighting])


def _mean(parts: list[tuple[Estimate, float]]) -> Estimate:
    """Weighted mean; its standard error treats the parts as independent and is None if one of theirs is."""
    total = sum(weight for _, weight in parts)
    value = sum(part.value * weight for part, weight in parts) / total
    if any(part.stderr is None for part, _ in parts):
        return Estimate(value, None)
    return Estimate(value, math.sqrt(sum(((part.stderr or 0.0) * weight) ** 2 for part, weight in parts)) / total)
