"""Gauntlets: baselines, averages and refusals of incomplete results."""

import math
from pathlib import Path
from typing import Any

import pytest
import yaml

from llmtrain.config.report import ConfigError
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.gauntlet import Gauntlet, gauntlet_scores, load_gauntlet
from llmtrain.eval.report.metrics import Estimate, Metrics

SPEC: dict[str, Any] = {
    "name": "two",
    "categories": {
        "first": [{"task": "arc_easy", "shots": 0, "baseline": 0.25}, {"task": "piqa", "shots": 5, "baseline": 0.5}],
        "second": [{"task": "lambada", "shots": 0, "baseline": 0}],
    },
}


def load(tmp_path: Path, **changes: Any) -> Gauntlet:
    (tmp_path / "two.yaml").write_text(yaml.safe_dump(SPEC | changes))
    return load_gauntlet(tmp_path / "two.yaml")


def metrics(value: float, stderr: float | None = 0.01, documents: int = 100) -> Metrics:
    values = {"acc": Estimate(value, stderr), "perplexity": Estimate(9.0, None), "other": Estimate(1.0, None)}
    return Metrics("acc", values, documents, documents, 0)


RESULTS = {
    ("arc_easy", 0): metrics(0.4, documents=1000),
    ("piqa", 5): metrics(0.7, documents=8),
    ("lambada", 0): metrics(0.3),
}


def test_scores_are_rescaled_from_chance_and_averaged(tmp_path):
    scores = gauntlet_scores(load(tmp_path), RESULTS)
    assert [row.score.value for row in scores.rows] == pytest.approx([0.15 / 0.75, 0.2 / 0.5, 0.3])
    assert scores.categories["first"].value == pytest.approx((0.2 + 0.4) / 2)
    assert scores.averages == {"average": scores.averages["average"]}
    assert scores.averages["average"].value == pytest.approx((0.3 + 0.3) / 2)
    first = math.hypot(0.01 / 0.75, 0.01 / 0.5) / 2
    assert scores.categories["first"].stderr == pytest.approx(first)
    assert scores.averages["average"].stderr == pytest.approx(math.hypot(first, 0.01) / 2)


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"rescale": False}, (0.15 + 0.2) / 2),
        ({"rescale": False, "subtract_baseline": False}, (0.4 + 0.7) / 2),
        ({"weighting": "documents"}, (0.2 * 1000 + 0.4 * 8) / 1008),
        ({"weighting": "log_documents"}, (0.2 * math.log2(1000) + 0.4 * 3) / (math.log2(1000) + 3)),
    ],
)
def test_weights_and_scales(tmp_path, changes, first):
    assert gauntlet_scores(load(tmp_path, **changes), RESULTS).categories["first"].value == pytest.approx(first)


def test_a_missing_result_is_an_error_and_no_silent_drop(tmp_path):
    with pytest.raises(
        EvalError, match=r"no results for arc_easy \(0-shot\), piqa \(5-shot\); it needs every benchmark"
    ):
        gauntlet_scores(load(tmp_path), {("lambada", 0): metrics(0.3), ("piqa", 0): metrics(0.5)})


def test_a_perplexity_is_no_accuracy(tmp_path):
    categories = {"a": [{"task": "lambada", "shots": 0, "baseline": 0, "metric": "perplexity"}]}
    with pytest.raises(EvalError, match="lambada has no accuracy 'perplexity'"):
        gauntlet_scores(load(tmp_path, categories=categories), RESULTS)


def test_mistakes_are_reported_at_once(tmp_path):
    twice = {"task": "piqa", "shots": 0, "baseline": 0.5}
    with pytest.raises(ConfigError) as raised:
        load(
            tmp_path,
            subtract_baseline=False,
            categories={"first": [twice, twice], "second": [twice]},
            averages={"first": ["first"], "all": ["frist"]},
        )
    for line in ("needs subtract_baseline", "is there twice with 0 shots", "did you mean first?", "of a category too"):
        assert line in str(raised.value), line


def test_a_benchmark_needs_its_baseline(tmp_path):
    with pytest.raises(ConfigError, match=r"categories.a.0.baseline +line \d+ +missing"):
        load(tmp_path, categories={"a": [{"task": "piqa", "shots": 0}]})


def test_tasks_beside_the_gauntlet_and_unknown_ones(tmp_path):
    (tmp_path / "mine.yaml").write_text("{name: mine, type: perplexity, source: {path: x.jsonl}}")
    categories = {
        "a": [{"task": "mine.yaml", "shots": 0, "baseline": 0}, {"task": "piqa", "shots": 0, "baseline": 0.5}]
    }
    assert load(tmp_path, categories=categories).benchmarks() == [(str(tmp_path / "mine.yaml"), 0), ("piqa", 0)]
    categories["a"][0]["task"] = "pika"
    with pytest.raises(ConfigError, match="there is no task 'pika': did you mean piqa"):
        load(tmp_path, categories=categories)


@pytest.mark.parametrize("name", ["seed", "core"])
def test_shipped_gauntlets(name):
    gauntlet = load_gauntlet(name)
    results = {key: metrics(1.0) for key in gauntlet.benchmarks()}
    assert all(average.value == pytest.approx(1.0) for average in gauntlet_scores(gauntlet, results).averages.values())
