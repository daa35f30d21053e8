"""Groups of tasks in results: rows, notes, JSON and the terminal."""

from pathlib import Path
from typing import Any

import pytest

from llmtrain.eval.lm_eval.groups import Aggregate, Group, GroupRun, Leaf
from llmtrain.eval.report.groups import group_lines, group_results
from llmtrain.eval.report.metrics import Estimate, Failure, Metrics, Result
from llmtrain.eval.report.results import Report, as_json, as_markdown, long_rows


def leaf(name: str, shots: int = 0) -> Leaf:
    return Leaf(name, {"task": name, "num_fewshot": shots}, Path("x.yaml"))


def group(name: str, *children: Leaf | Group, metrics: tuple[str, ...] = ("acc",)) -> Group:
    aggregates = [Aggregate(metric, None, True) for metric in metrics]
    return Group(name, name.upper(), aggregates, Path("x.yaml"), {one.name: one for one in children})


def result(model: str, task: str, shots: int, value: float, documents: int, **others: float) -> Result:
    values = {"acc": Estimate(value, 0.01)} | {name: Estimate(one, None) for name, one in others.items()}
    rest: dict[str, Any] = {"convention": "lm-eval", "dtype": "float32", "seconds": 1.0, "asked": documents}
    return Result(
        model,
        model,
        task,
        shots,
        f"{task} ({shots}-shot)",
        metrics=Metrics("acc", values, documents, documents, 0),
        **rest,
    )


ALL = group("all", group("part", leaf("a"), leaf("b")), leaf("c", 3), metrics=("acc", "exact_match"))


@pytest.fixture
def report() -> Report:
    results = [
        *(
            result("m", "a", 0, 0.25, 100),
            result("m", "b", 0, 0.5, 300),
            result("m", "c", 3, 1.0, 400, **{"exact_match,x": 0.125}),
        ),
        *(result("n", "a", 0, 0.5, 100), result("n", "b", 0, 0.75, 300), result("n", "c", 3, 0.0, 400)),
        *(result("m", "single", 0, 0.5, 7), result("n", "single", 0, 0.5, 7)),
    ]
    groups = [one for model in ("m", "n") for one in group_results([GroupRun(ALL, None)], model, results)]
    return Report("try", results, groups=groups)


def test_the_table_of_groups_has_their_tasks_below_them(report):
    lines = as_markdown(report).splitlines()
    start = lines.index("## Groups") + 2
    assert lines[start : start + 8] == [
        "| task | metric | documents | m | n |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| **ALL** | acc | 800 | 71.9 ± 0.6 | 34.4 ± 0.6 |",
        "| **ALL** | exact_match,x | 400 | 12.5 |  |",
        "| &nbsp;&nbsp;c (3-shot) | acc | 400 | 100.0 ± 1.0 | 0.0 ± 1.0 |",
        "| &nbsp;&nbsp;c (3-shot) | exact_match,x | 400 | 12.5 |  |",
        "| &nbsp;&nbsp;**PART** (0-shot) | acc | 400 | 43.8 ± 0.8 | 68.8 ± 0.8 |",
        "| &nbsp;&nbsp;&nbsp;&nbsp;a (0-shot) | acc | 100 | 25.0 ± 1.0 | 50.0 ± 1.0 |",
    ]


def test_the_wide_table_has_only_tasks_outside_of_groups(report):
    lines = as_markdown(report).splitlines()
    assert "| model | single (0-shot)<br>acc |" in lines and "Documents: single (0-shot) 7." in lines
    assert "- m, all: 2 of its tasks have no exact_match,x (a, b)." in lines


def test_json_has_every_group_with_its_metrics(report):
    groups = as_json(report, {})["groups"]
    assert [(one["model"], one["group"], one["parents"], one["shots"]) for one in groups] == [
        *(("m", "all", [], None), ("m", "part", ["all"], 0), ("n", "all", [], None), ("n", "part", ["all"], 0))
    ]
    assert groups[0]["children"] == ["part", "c (3-shot)"]
    assert groups[0]["metrics"]["acc"]["documents"] == 800
    assert groups[0]["metrics"]["acc"]["value"] == pytest.approx((0.25 * 100 + 0.5 * 300 + 400) / 800)


def test_the_terminal_has_a_line_for_each_metric(report):
    assert group_lines(report.groups)[:3] == [
        "m  all  acc 0.7188 ± 0.0064  800 documents",
        "m  all  exact_match,x 0.1250  400 documents",
        "m  part (0-shot)  acc 0.4375 ± 0.0079  400 documents",
    ]


def test_a_group_with_a_failed_task_has_no_average_and_reports_it():
    results = [result("m", "a", 0, 0.25, 100), result("m", "c", 3, 1.0, 400)]
    results += [result("n", name, shots, 0.5, 100) for name, shots in (("a", 0), ("b", 0), ("c", 3))]
    groups = [one for model in ("m", "n") for one in group_results([GroupRun(ALL, None)], model, results)]
    failures = [Failure("b (0-shot)", "no such file", ["m"])]
    made = Report("try", results, groups=groups, failures=failures)
    lines = as_markdown(made).splitlines()
    start = lines.index("## Groups") + 4
    assert lines[start : start + 5] == [
        "| **ALL** | acc | 300 | failed | 50.0 ± 0.6 |",
        "| &nbsp;&nbsp;c (3-shot) | acc | 400 | 100.0 ± 1.0 | 50.0 ± 1.0 |",
        "| &nbsp;&nbsp;**PART** (0-shot) | acc | 200 | failed | 50.0 ± 0.7 |",
        "| &nbsp;&nbsp;&nbsp;&nbsp;a (0-shot) | acc | 100 | 25.0 ± 1.0 | 50.0 ± 1.0 |",
        "| &nbsp;&nbsp;&nbsp;&nbsp;b (0-shot) | acc | 100 | failed | 50.0 ± 1.0 |",
    ]
    assert "- m, all: no average, because 1 of its tasks failed (b (0-shot))." in lines
    assert group_lines(groups)[0] == "m  all  no average: 1 of its tasks failed (b (0-shot))"
    assert as_json(made, {})["groups"][0]["failed"] == ["b (0-shot)"]
    assert not any(row[0] == "m" and row[1] in ("all", "part") for row in long_rows(made))


def test_a_task_that_failed_for_all_models_is_still_in_its_groups_table():
    results = [result("m", "a", 0, 0.25, 100)]
    groups = group_results([GroupRun(group("some", leaf("a"), leaf("b")), None)], "m", results)
    table = as_markdown(Report("try", results, groups=groups))
    assert "| **SOME** (0-shot) |  |  | failed |" in table and "| &nbsp;&nbsp;b (0-shot) |  |  | failed |" in table


def test_shots_of_a_run_hold_for_all_tasks_of_a_group():
    results = [result("m", name, 5, 0.5, 10) for name in "abc"]
    found = group_results([GroupRun(ALL, 5)], "m", results)
    assert [(one.title, one.children) for one in found] == [
        ("all (5-shot)", ("part", "c (5-shot)")),
        ("part (5-shot)", ("a (5-shot)", "b (5-shot)")),
    ]


def test_a_group_without_aggregated_metrics_still_lists_its_tasks():
    results = [result("m", "a", 0, 0.25, 100)]
    groups = group_results([GroupRun(group("plain", leaf("a"), metrics=()), None)], "m", results)
    table = as_markdown(Report("try", results, groups=groups))
    assert "| **PLAIN** (0-shot) |  |  |  |" in table and "| &nbsp;&nbsp;a (0-shot) | acc | 100 | 25.0 ± 1.0 |" in table
