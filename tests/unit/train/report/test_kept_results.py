"""Results that a run keeps of its evaluations."""

import json
from pathlib import Path

from llmtrain.eval.report.document_scores import read_lines
from llmtrain.eval.report.results import Report
from llmtrain.train.callbacks.evaluation import KeptResults
from tests.support.results import choices, result


def report(*hits: bool) -> Report:
    return Report("quick", [result("run", "t", choices(hits))])


def steps(root: Path, pattern: str) -> list[int]:
    return sorted(int(path.relative_to(root / "icl").parts[0][5:]) for path in (root / "icl").glob(pattern))


def test_answers_of_the_newest_and_results_of_all_are_kept(tmp_path):
    kept = KeptResults(tmp_path, {"name": "quick"}, keep_answers=2)
    for step in (10, 20, 30):
        kept.write(step, report(True, False))
    assert steps(tmp_path, "*/results.json") == steps(tmp_path, "*/results_long.csv") == [10, 20, 30]
    assert steps(tmp_path, "*/documents") == [20, 30]
    KeptResults(tmp_path, {}, keep_answers=None).write(40, report(True))
    assert steps(tmp_path, "*/documents") == [20, 30, 40]


def test_a_step_that_is_run_again_replaces_its_own(tmp_path):
    kept = KeptResults(tmp_path, {}, keep_answers=2)
    for step in (10, 20, 30):
        kept.write(step, report(True, False))
    KeptResults(tmp_path, {}, keep_answers=2).write(20, report(False, False, True))  # resumed from step 10
    folder = tmp_path / "icl" / "step-00000020"
    [row] = json.loads((folder / "results.json").read_text())["results"]
    assert row["documents"] == len(read_lines(folder / row["documents_file"])) == 3
    assert steps(tmp_path, "*/documents") == [20, 30]


def test_training_goes_on_where_nothing_can_be_written(tmp_path, capsys):
    (tmp_path / "icl").write_text("a file")
    KeptResults(tmp_path, {}, keep_answers=2).write(10, report(True))
    said = capsys.readouterr().out
    assert "WARNING" in said and "step-00000010 cannot be written" in said and "Training goes on" in said
