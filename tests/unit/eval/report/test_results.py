"""Files of results: the table, the meaning of its numbers, and each format."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest

from llmtrain.eval.report.gauntlet import Gauntlet, gauntlet_scores
from llmtrain.eval.report.metrics import DocumentMetrics, Estimate, Metrics
from llmtrain.eval.report.results import Report, Result, as_csv, as_json, as_markdown, flat_metrics, write_results


def metrics(value: float, stderr: float | None = 0.01, headline: str = "acc_sum", truncated: int = 0) -> Metrics:
    per_document = [DocumentMetrics(7, None, {}, {"document": 7, "log_likelihoods": [-1.5]}, 0)]
    values = {headline: Estimate(value, stderr), "acc_per_char": Estimate(0.5, None)}
    return Metrics(headline, values, 100, 400, truncated, {}, per_document)


def result(model: str, task: str, shots: int, found: Metrics) -> Result:
    rest: dict[str, Any] = {"convention": "lm-eval", "dtype": "bfloat16", "seconds": 1.25, "asked": 100}
    return Result(model, f"/runs/{model}", task, shots, f"{task} ({shots}-shot)", metrics=found, **rest)


@pytest.fixture
def report() -> Report:
    results = [
        result("a|b", "arc", 0, metrics(0.25)),
        result("a|b", "arc", 5, metrics(0.3125, None)),
        result("a|b", "text", 0, metrics(23.456789, 0.5, "word_perplexity")),
        result("c", "arc", 0, metrics(0.5, truncated=3)),
        result("c", "arc", 5, metrics(0.75)),
        result("c", "text", 0, metrics(9.0, None, "word_perplexity")),
    ]
    benchmark = {"task": "arc", "shots": 0, "baseline": 0.25}
    gauntlet = Gauntlet.model_validate({"name": "g", "categories": {"easy": [benchmark]}})
    scores = {
        model: gauntlet_scores(gauntlet, {("arc", 0): one.metrics})
        for model, one in (("a|b", results[0]), ("c", results[3]))
    }
    return Report("try", results, gauntlet, scores)


def test_the_table_has_a_row_for_each_model_and_says_what_it_measures(report):
    text = as_markdown(report)
    lines = text.splitlines()
    assert "lm-evaluation-harness 0.4.13's convention (`lm-eval`), weights in bfloat16" in text
    head = lines.index(next(line for line in lines if line.startswith("| model | arc")))
    assert lines[head].split(" | ")[1:] == [
        "arc (0-shot)<br>acc_sum",
        "arc (5-shot)<br>acc_sum",
        "text (0-shot)<br>word_perplexity |",
    ]
    assert lines[head + 1].count("---") == 4
    assert lines[head + 2] == "| a\\|b | 25.0 ± 1.0 | 31.2 | 23.46 ± 0.5 |"
    assert lines[head + 3] == "| c | 50.0 ± 1.0 | 75.0 ± 1.0 | 9 |"
    assert "`acc_sum`: the choice of the highest log-likelihood (`acc`)" in text
    assert "c, arc (0-shot): 3 of 400 contexts were cut" in text
    assert re.search(r"^Documents: arc \(0-shot\) \d+, arc \(5-shot\) \d+, text \(0-shot\) \d+\.$", text, re.MULTILINE)
    assert "| c | 33.3 ± 1.3 | 33.3 ± 1.3 |" in text, "above the baseline, rescaled"


def test_csv_holds_numbers_as_they_are(report):
    heads, first, second = csv.reader(io.StringIO(as_csv(report)))
    assert heads[:4] == ["model", "convention", "arc (0-shot) acc_sum", "arc (0-shot) acc_sum stderr"]
    assert first[:6] == ["a|b", "lm-eval", "0.25", "0.01", "0.3125", ""]
    assert heads[-2:] == ["gauntlet average", "gauntlet average stderr"]
    assert float(second[-2]) == pytest.approx(1 / 3)
    assert len(heads) == len(first) == len(second)


def test_json_holds_everything(report):
    content = as_json(report, {"limit": None})
    first = content["results"][0]
    assert first["value"] == 0.25 and first["stderr"] == 0.01 and first["metric"] == "acc_sum"
    assert first["metrics"]["acc_per_char"] == {"value": 0.5, "stderr": None}
    assert content["gauntlet"]["c"]["averages"]["average"]["value"] == pytest.approx(1 / 3)
    assert content["settings"] == {"limit": None}
    assert json.loads(json.dumps(content, allow_nan=False)) == content


def test_files_appear_whole_and_details_on_request(report, tmp_path):
    paths = write_results(report, tmp_path / "out", settings={}, details=True)
    names = {str(path.relative_to(tmp_path / "out")) for path in paths}
    assert {"results.json", "results.md", "results.csv", "results.png"} < names
    assert "details/a_b/arc-5-shot.jsonl" in names
    assert not list((tmp_path / "out").rglob("*.partial*"))
    line = (tmp_path / "out" / "details" / "c" / "arc-0-shot.jsonl").read_text()
    assert json.loads(line) == {"document": 7, "log_likelihoods": [-1.5]}
    few = write_results(report, tmp_path / "few", settings={}, details=False)
    assert len(few) == 4


def test_a_picture_is_of_accuracies(report, tmp_path):
    only_text = Report("try", [one for one in report.results if one.task == "text"])
    assert "results.png" not in {path.name for path in write_results(only_text, tmp_path, settings={}, details=False)}


def test_names_for_loggers(report):
    found = flat_metrics([one for one in report.results if one.model == "c"])
    assert found["icl/text/word_perplexity"] == 9.0
    assert found["icl/arc-0-shot/acc_sum"] == 0.5 and found["icl/arc-5-shot/acc_sum"] == 0.75
    assert "icl/arc/acc_sum" in flat_metrics([report.results[0]])
    assert {name for name in found if name.endswith("truncated")} == {"icl/arc-0-shot/truncated"}
    assert found["icl/arc-0-shot/truncated"] == 3
