"""`llmtrain eval` with files of lm-evaluation-harness: groups in results, refusals, and gauntlets."""

import json
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.eval.lm_eval import index
from llmtrain.eval.report.document_scores import given_answer, read_lines
from tests.support.evaluation import Place, records

CLOZE = """
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{context}}}}"
doc_to_target: " {{{{continuation}}}}"
metric_list: [{{metric: acc}}, {{metric: perplexity}}]
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("eval"))


@pytest.fixture
def folder(place, tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(index, "installed_folder", lambda: None)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(record) + "\n" for record in records("cloze", 6)))
    (tmp_path / "base").write_text(CLOZE.format(data=data))
    for name in ("one", "two"):
        (tmp_path / f"{name}.yaml").write_text(f"include: base\ntask: {name}\ntag: both\n")
    (tmp_path / "g.yaml").write_text("group: pair\ntask: [both]\naggregate_metric_list: [{metric: acc}]\n")
    (tmp_path / "code.yaml").write_text("include: base\ntask: code\nprocess_docs: !function utils.docs\n")
    return tmp_path


def test_a_group_has_a_row_in_every_result(place, folder, capsys):
    out = folder / "out"
    file = place.write({"tasks": ["pair"]})
    assert main(["eval", str(file), "--out", str(out), "--lm-eval-folder", str(folder)]) == 0
    content, said = json.loads((out / "results.json").read_text()), capsys.readouterr().out
    [group] = content["groups"]
    tasks = {one["task"]: one["metrics"]["acc"]["value"] for one in content["results"]}
    assert tasks.keys() == {"one", "two"} and group["children"] == ["one (0-shot)", "two (0-shot)"]
    assert group["metrics"]["acc"]["value"] == pytest.approx(sum(tasks.values()) / 2)
    assert "tiny  pair (0-shot)  acc " in said and "| **pair** (0-shot) | acc | 12 |" in said


def test_a_group_with_a_failed_task_has_no_average_and_the_other_task_is_kept(place, folder, capsys):
    """A document without its answer, and answers that the task's own code cannot score."""
    lines = [*(folder / "data.jsonl").read_text().splitlines(), json.dumps({"context": "Is it"})]
    (folder / "bad.jsonl").write_text("\n".join(lines) + "\n")
    strict = CLOZE.format(data=folder / "bad.jsonl").replace("{{continuation}}", "{{continuation.strip()}}")
    (folder / "two.yaml").write_text(f"{strict}task: two\ntag: both\n")
    (folder / "three.yaml").write_text(
        "include: base\ntask: three\ntag: both\nprocess_results: !function utils.scored\n"
    )
    (folder / "utils.py").write_text("def scored(record, results):\n    raise ArithmeticError('no score')\n")
    flags = ["--lm-eval-folder", str(folder), "--allow-code", str(folder)]
    assert main(["eval", str(place.write({"tasks": ["pair"]})), "--out", str(folder / "out"), *flags]) == 2
    content, said = json.loads((folder / "out/results.json").read_text()), capsys.readouterr()
    [group] = content["groups"]
    assert [one["task"] for one in content["results"]] == ["one"]
    assert group["metrics"] == {} and group["failed"] == ["three (0-shot)", "two (0-shot)"]
    reasons = {one["title"]: one["reason"] for one in content["failed"]}
    assert "[test]:7: `doc_to_target`: 'None' has no attribute 'strip'" in reasons["two (0-shot)"]
    assert reasons["three (0-shot)"] == "task three: json [test]:1: no score"
    assert "| **pair** (0-shot) |  |  | failed |" in said.out and "Traceback" not in said.err
    skipping = [str(place.write({"tasks": ["one", "two"]})), "skip_bad_documents=true", "--out", str(folder / "kept")]
    assert main(["eval", *skipping, *flags]) == 0
    assert "tiny, two (0-shot): 1 of 7 documents left out" in capsys.readouterr().out
    assert main(["compare", str(folder / "kept"), str(folder / "out"), "--out", str(folder / "compared")]) == 0
    assert "two (0-shot) failed for tiny" in capsys.readouterr().out


def test_shots_of_the_command_line_hold_for_groups(place, folder, capsys):
    flags = ["--lm-eval-folder", str(folder), "--out", str(folder / "out"), "--limit", "2"]
    assert main(["eval", "--tasks", "pair,one", "--shots", "1", f"model={place.model}", *flags]) == 0
    content = json.loads((folder / "out/results.json").read_text())
    assert [(one["task"], one["shots"]) for one in content["results"]] == [("one", 1), ("two", 1)]
    assert [(one["group"], one["shots"]) for one in content["groups"]] == [("pair", 1)]
    (folder / "rolling.yaml").write_text(
        "include: base\ntask: rolling\noutput_type: loglikelihood_rolling\nmetric_list: [{metric: word_perplexity}]\n"
    )
    assert main(["eval", "--tasks", "rolling", "--shots", "1", f"model={place.model}", *flags]) == 2
    assert "task rolling: the perplexity of a text has no few-shot examples" in capsys.readouterr().err


def test_shots_of_the_command_line_do_not_hold_for_a_task_whose_file_states_none(place, folder, capsys):
    """The harness keeps 0 in silence; an entry of the task's own in a YAML gives examples all the same."""
    (folder / "zero.yaml").write_text("include: base\ntask: zero\nnum_fewshot: 0\n")
    flags = ["--lm-eval-folder", str(folder), "--out", str(folder / "out"), "--limit", "2"]
    assert main(["eval", "--tasks", "zero,one", "--shots", "0,1", f"model={place.model}", *flags]) == 2
    assert "task zero: its num_fewshot is 0, which lm-evaluation-harness keeps" in capsys.readouterr().err
    file = place.write({"tasks": [{"task": "zero", "shots": [1]}, "one"]})
    assert main(["eval", str(file), *flags]) == 0
    content = json.loads((folder / "out/results.json").read_text())
    assert [(one["task"], one["shots"]) for one in content["results"]] == [("zero", 1), ("one", 0)]


def test_a_task_that_cannot_run_is_refused_before_a_model_is_read(place, folder, capsys):
    file = place.write({"tasks": ["both", "code"], "models": ["nowhere"], "out": str(folder / "out")})
    assert main(["eval", str(file), "--lm-eval-folder", str(folder)]) == 2
    said = capsys.readouterr().err
    assert "tasks.1" in said and "process_docs" in said and "utils.docs" in said and "Traceback" not in said


def test_check_reads_no_data(place, folder, capsys):
    (folder / "data.jsonl").unlink()
    file = place.write({"tasks": ["pair"], "lm_eval_folders": [str(folder)]})
    assert main(["check", str(file)]) == 0
    assert capsys.readouterr().out == f"{file}: OK, 2 tasks: one (0-shot), two (0-shot)\n"
    assert main(["check", str(file), "tasks=[pear]"]) == 2
    assert "tasks.0" in (said := capsys.readouterr().err) and "did you mean pair" in said


def test_import_task_explains_what_to_do_instead(capsys):
    assert main(["eval", "import-task", "my.yaml"]) == 2
    assert (
        "a task of lm-evaluation-harness runs as it is, also in a gauntlet, by --tasks my.yaml"
        in capsys.readouterr().err
    )


def test_a_gauntlet_averages_tasks_of_the_harness(place, folder, capsys):
    benchmark = {"task": str(folder / "one.yaml"), "shots": 1, "baseline": 0.0}
    (folder / "gauntlet.yaml").write_text(json.dumps({"name": "g", "categories": {"all": [benchmark]}}))
    file = place.write({"tasks": [], "gauntlet": str(folder / "gauntlet.yaml")})
    assert main(["eval", str(file), "--out", str(folder / "out")]) == 0
    content = json.loads((folder / "out/results.json").read_text())
    [task] = content["results"]
    assert content["gauntlet"]["tiny"]["averages"]["average"]["value"] == task["metrics"]["acc"]["value"]


def test_reports_say_what_was_chosen(place, folder, capsys):
    """Of multiple choice, `acc` is the likeliest choice, and the answer is that choice."""
    rows = [{"q": "the fox", "c": ["jumps", "seven wizards make"], "g": number % 2} for number in range(4)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mc.yaml").write_text(
        "dataset_path: json\ndataset_kwargs: {data_files: {test: rows.jsonl}}\ntest_split: test\ntask: mc\n"
        "output_type: multiple_choice\ndoc_to_text: q\ndoc_to_choice: c\ndoc_to_target: g\n"
    )
    assert main(["eval", "--tasks", str(folder / "mc.yaml"), f"model={place.model}", "--out", str(folder / "out")]) == 0
    assert "- `acc`: the choice of the highest log-likelihood" in capsys.readouterr().out
    [line, *_] = read_lines(folder / "out/documents/tiny/mc-0-shot.jsonl.gz")
    likelihoods = line["log_likelihoods"]
    assert line["chosen"]["acc"] == likelihoods.index(max(likelihoods))
    assert given_answer(line, "acc") == rows[0]["c"][line["chosen"]["acc"]]
    assert given_answer(line, "acc_norm") == rows[0]["c"][line["chosen"]["norm"]]
