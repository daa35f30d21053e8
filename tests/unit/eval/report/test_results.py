"""Files of results: the table, the meaning of its numbers, and each format."""

import csv
import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest

from llmtrain.eval.report.document_scores import read_lines
from llmtrain.eval.report.gauntlet import Gauntlet, gauntlet_scores
from llmtrain.eval.report.metrics import DocumentMetrics, Estimate, Metrics, Result
from llmtrain.eval.report.results import Report, as_csv, as_json, as_long_csv, as_markdown, write_results
from llmtrain.eval.report.tracking import flat_metrics
from tests.support.results import choices, texts
from tests.support.results import result as result_of


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


def test_the_table_has_a_row_for_each_model_and_explains_what_it_measures(report):
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


@pytest.mark.parametrize(
    ("headline", "kind", "meaning"),
    [
        ("acc", "multiple_choice", "the choice of the highest log-likelihood (`acc`)"),
        ("acc,first", "multiple_choice", "the choice of the highest log-likelihood (`acc`)"),
        ("acc", "loglikelihood", "every token of the continuation is the likeliest"),
        ("acc", None, "every token of the continuation is the likeliest"),  # of our own YAMLs
        ("acc", "generate_until", None),  # of a task's own code
    ],
)
def test_accuracy_is_explained_as_it_is_computed(headline, kind, meaning):
    settings = {} if kind is None else {"output_type": kind}
    text = as_markdown(
        Report("try", [replace(result("m", "t", 0, metrics(0.5, headline=headline)), task_settings=settings)])
    )
    assert [line for line in text.splitlines() if line.startswith(f"- `{headline}`")] == (
        [f"- `{headline}`: {meaning}"] if meaning else []
    )


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


def test_the_long_table_has_a_row_for_each_metric_and_category():
    parts: dict[str, Any] = {"categories": ["law", "art"]}
    results = [
        result_of("x", "t", choices([True, False, True, True]), **parts),
        result_of("x", "prose", texts([3.0, 4.0])),
    ]
    benchmarks = [{"task": "t", "shots": 0, "baseline": 0.5}]
    gauntlet = Gauntlet.model_validate({"name": "g", "categories": {"easy": benchmarks}})
    report = Report("try", results, gauntlet, {"x": gauntlet_scores(gauntlet, {("t", 0): results[0].metrics})})
    heads, *rows = csv.reader(io.StringIO(as_long_csv(report)))
    assert heads == ["model", "task", "shots", "category", "metric", "value", "stderr", "n"]
    found = {(task, category, metric): (value, stderr, n) for _, task, _, category, metric, value, stderr, n in rows}
    score = results[0].metrics.score
    assert found["t", "", "acc_sum"] == (str(score.value), str(score.stderr), "4")
    assert found["t", "law", "acc_per_char"] == ("1.0", "0.0", "2") and found["t", "art", "acc_sum"][0] == "0.5"
    assert float(found["prose", "", "word_perplexity"][0]) == results[1].metrics.score.value
    assert float(found["gauntlet g", "average", "score"][0]) == pytest.approx(0.5)
    assert found["gauntlet g", "easy", "score"][2] == "4"
    assert len(rows) == 3 * 4 + 4 + 2 and {row[0] for row in rows} == {"x"}
    assert rows[0][:5] == ["x", "t", "0", "", "acc_sum"]


def test_files_appear_whole_with_every_document(report, tmp_path):
    paths = write_results(report, tmp_path, settings={})
    names = {str(path.relative_to(tmp_path)) for path in paths}
    assert names == {"results.json", "results.md", "results.csv", "results_long.csv", "results.png", "documents"}
    assert not list(tmp_path.rglob("*.partial*"))
    content = json.loads((tmp_path / "results.json").read_text())
    files = [one["documents_file"] for one in content["results"]]
    assert files[1] == "documents/a_b/arc-5-shot.jsonl.gz" and len(set(files)) == 6
    assert read_lines(tmp_path / files[3]) == [{"document": 7, "log_likelihoods": [-1.5], "values": {}}]
    again = {file: (tmp_path / file).read_bytes() for file in files}
    write_results(report, tmp_path, settings={}, picture=False)
    assert again == {file: (tmp_path / file).read_bytes() for file in files}


def test_models_whose_names_make_one_file_name_have_files_of_their_own(tmp_path):
    both = [result_of(name, "t", choices([hit])) for name, hit in (("a b", True), ("a/b", False))]
    write_results(Report("try", both), tmp_path, settings={}, picture=False)
    content = json.loads((tmp_path / "results.json").read_text())
    hits = [read_lines(tmp_path / one["documents_file"])[0]["values"]["acc_sum"] for one in content["results"]]
    assert hits == [1.0, 0.0]


def test_a_picture_is_of_accuracies(report, tmp_path):
    only_text = Report("try", [one for one in report.results if one.task == "text"])
    assert "results.png" not in {path.name for path in write_results(only_text, tmp_path, settings={})}


def test_a_score_up_to_100_of_a_task_s_own_is_not_shown_in_percent(tmp_path):
    """As the BLEU of truthfulqa_gen, which its code computes: `bleu_max`."""
    report = Report("try", [result("c", "said", 0, metrics(25.125, 0.5, "bleu_max"))])
    assert "| c | 25.12 ± 0.5 |" in as_markdown(report)
    assert write_results(report, tmp_path, settings={})[-2].name == "results_long.csv"  # no picture of accuracies


def test_names_for_loggers(report):
    found = flat_metrics([one for one in report.results if one.model == "c"])
    assert found["icl/text/word_perplexity"] == 9.0
    assert found["icl/arc-0-shot/acc_sum"] == 0.5 and found["icl/arc-5-shot/acc_sum"] == 0.75
    assert "icl/arc/acc_sum" in flat_metrics([report.results[0]])
    assert {name for name in found if name.endswith("truncated")} == {"icl/arc-0-shot/truncated"}
    assert found["icl/arc-0-shot/truncated"] == 3
    assert found["icl/arc-0-shot/acc_sum_stderr"] == 0.01
    assert "icl/text/word_perplexity_stderr" not in found, "it is not known"
