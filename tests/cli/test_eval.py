"""`llmtrain eval`: results, continued runs and refusals."""

import csv
import itertools
import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from llmtrain.cli import main
from llmtrain.eval.errors import EvalError
from llmtrain.eval.report.document_scores import read_lines
from llmtrain.eval.scoring import load as loading
from llmtrain.eval.scoring.load import FoundModel
from llmtrain.eval.scoring.scorer import HybridScorer
from tests.support.evaluation import TASKS, Place
from tests.support.project import LLMTRAIN, Project


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Place:
    return Place(tmp_path_factory.mktemp("eval"))


def evaluate(place: Place, out: Path, *arguments: object, **changes: Any) -> dict[str, Any]:
    file = place.write(changes)
    assert main(["eval", str(file), "--out", str(out), *map(str, arguments)]) == 0
    return json.loads((out / "results.json").read_text())


def scores(content: dict[str, Any]) -> dict[str, float]:
    return {f"{one['model']} {one['task']} {one['shots']}": one["value"] for one in content["results"]}


@pytest.fixture(scope="module")
def whole(place, tmp_path_factory) -> dict[str, Any]:
    """Results of an uninterrupted run."""
    return evaluate(place, tmp_path_factory.mktemp("whole"))


def test_results_are_written_as_json_markdown_csv_and_a_picture(place, tmp_path, capsys):
    content = evaluate(place, tmp_path)
    said = capsys.readouterr().out
    titles = ["choice (0-shot)", "choice (2-shot)", *(f"{name} (0-shot)" for name in TASKS[1:])]
    assert [one["task"] for one in content["results"]] == ["choice", *TASKS]
    assert {one["convention"] for one in content["results"]} == {"lm-eval"}
    table = (tmp_path / "results.md").read_text()
    assert table in said and all(title in table for title in titles)
    assert "lm-evaluation-harness 0.4.13's convention" in table and "± " in table and "`acc_sum`" in table
    [heads, row] = csv.reader((tmp_path / "results.csv").open())
    assert row[0] == "tiny" and heads[2:4] == ["choice (0-shot) acc_sum", "choice (0-shot) acc_sum stderr"]
    assert float(row[2]) == content["results"][0]["value"] and len(heads) == 2 + 2 * 6
    assert (tmp_path / "results.png").read_bytes().startswith(b"\x89PNG")
    lines = read_lines(tmp_path / "documents" / "tiny" / "choice-2-shot.jsonl.gz")
    assert len(lines) == 12 and len(lines[0]["log_likelihoods"]) == 8 and lines[0]["where"].endswith("choice.jsonl:1")
    assert sum(line["values"]["acc_sum"] for line in lines) / 12 == content["results"][1]["value"]
    long = list(csv.DictReader((tmp_path / "results_long.csv").open()))
    assert (
        len(long) == sum(len(one["metrics"]) for one in content["results"]) and f"{tmp_path}/results_long.csv" in said
    )
    assert sorted(content["results"][0]["metrics"]) == sorted(
        ["acc_sum", "acc_per_token", "acc_per_char", "acc_per_byte", "acc_pmi"]
    )


def test_a_repeated_run_asks_nothing_and_loads_no_model(place, tmp_path, whole, monkeypatch):
    assert scores(evaluate(place, tmp_path)) == scores(whole)
    monkeypatch.setattr(loading, "load_scorer", None)
    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", None)
    again = evaluate(place, tmp_path)
    assert [one["asked"] for one in again["results"]] == [0] * 6
    assert scores(again) == scores(whole)


def interrupt(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have a call of the scorer's, counted from 1, end by Ctrl-C."""
    calls, loglikelihood = itertools.count(1), HybridScorer.loglikelihood

    def interrupted(self: HybridScorer, *args: Any, **options: Any) -> Any:
        if next(calls) == number:
            raise KeyboardInterrupt
        return loglikelihood(self, *args, **options)

    monkeypatch.setattr(HybridScorer, "loglikelihood", interrupted)


def test_an_interrupted_run_continues(place, tmp_path, whole, monkeypatch, capsys):
    file = place.write({})
    few = ["--max-batch-tokens", "20"]  # so that there are several chunks
    with monkeypatch.context() as patched:
        interrupt(patched, 4)
        assert main(["eval", str(file), "--out", str(tmp_path), *few]) == 130
    assert not (tmp_path / "results.json").exists()
    continued = evaluate(place, tmp_path, *few)
    asked = [one["asked"] for one in continued["results"]]
    assert 0 < asked[0] < 12 and asked[1:] == [12, 12, 12, 2, 12]
    assert scores(continued) == pytest.approx(scores(whole))


def test_an_interrupted_run_keeps_what_was_done_and_what_failed(place, tmp_path, monkeypatch):
    (place.folder / "bad.jsonl").write_text('{"query": "no choices"}\n')
    (place.folder / "bad.yaml").write_text(
        '{"name": "bad", "type": "multiple_choice", "source": {"path": "bad.jsonl"}}'
    )
    interrupt(monkeypatch, 2)
    file = place.write({"tasks": [str(place.folder / "bad.yaml"), *place.tasks[1:3]]})
    assert main(["eval", str(file), "--out", str(tmp_path)]) == 130
    content = json.loads((tmp_path / "results.json").read_text())
    assert [one["task"] for one in content["results"]] == ["schema"]
    assert [one["title"] for one in content["failed"]] == ["bad (0-shot)"]


def test_results_of_other_settings_are_set_aside(place, tmp_path, capsys):
    out = tmp_path / "out"
    first = evaluate(place, out, tasks=place.tasks[1:2])
    evaluate(place, out, tasks=place.tasks[1:2], share_prefixes=False)
    assert [one.name for one in tmp_path.iterdir()] == ["out"]  # the same evaluation
    (tmp_path / "out-1").mkdir()
    (tmp_path / "out-1" / "note").write_text("mine")
    (out / "note").write_text("mine")
    second = evaluate(place, out, tasks=place.tasks[2:3])
    kept = tmp_path / "out-2"
    assert f"{out} had the results of another evaluation, which are now in {kept}" in capsys.readouterr().err
    assert json.loads((kept / "results.json").read_text())["results"][0]["value"] == first["results"][0]["value"]
    assert [one["task"] for one in second["results"]] == ["cloze"]
    assert (kept / first["results"][0]["documents_file"]).is_file() and not (kept / "note").exists()
    assert (tmp_path / "out-1" / "note").read_text() == (out / "note").read_text() == "mine"


def test_results_that_would_be_lost_are_set_aside(place, tmp_path, capsys):
    """By the same command, of data that have changed since."""
    out, tasks = tmp_path / "out", place.tasks[1:3]
    evaluate(place, out, tasks=tasks)
    evaluate(place, out, tasks=tasks, cache=None)
    assert not (tmp_path / "out-1").exists()  # the same once more
    data = place.folder / "schema.jsonl"
    before = data.read_text()
    data.write_text("".join(before.splitlines(keepends=True)[:5]))
    try:
        assert evaluate(place, out, tasks=tasks)["results"][0]["documents"] == 5
    finally:
        data.write_text(before)
    assert json.loads((tmp_path / "out-1" / "results.json").read_text())["results"][0]["documents"] == 12
    assert f"which are now in {tmp_path / 'out-1'}" in capsys.readouterr().err


def test_what_changes_the_answers_is_asked_anew(place, tmp_path):
    def asked(*arguments: object, **changes: Any) -> list[int]:
        tasks = place.tasks[1:3]
        return [one["asked"] for one in evaluate(place, tmp_path, *arguments, **{"tasks": tasks, **changes})["results"]]

    assert asked() == [12, 12]
    assert asked() == [0, 0]
    assert asked("--max-batch-tokens", "50", share_prefixes=False) == [0, 0]
    assert asked(convention="foundry") == [12, 12]
    assert asked("--max-length", "40") == [12, 12]
    assert asked(dtype="bfloat16") == [12, 12]
    assert asked("--weights", "int8") == [12, 12]
    assert asked("--limit", "3") == [3, 3]
    data = place.folder / "schema.jsonl"
    before = data.read_text()
    data.write_text(before.replace("the", "a", 1))
    try:
        assert asked() == [12, 0]
    finally:
        data.write_text(before)
    assert asked(cache=None) == [12, 12]
    manifest = next(place.model.rglob("manifest.json"))
    manifest.touch()
    assert asked() == [12, 12]


@pytest.mark.ci
def test_two_processes_say_the_same(place, tmp_path, whole):
    file = place.write({})
    project = Project.__new__(Project)
    project.folder = tmp_path
    status, text = project.run(*LLMTRAIN, "eval", str(file), "--nproc", "2", f"out={tmp_path / 'out'}")
    assert status == 0, text
    assert text.count("choice (2-shot)  acc_sum") == 1
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert scores(content) == pytest.approx(scores(whole))


def test_two_processes_are_not_started_for_what_cannot_be_run(place, capsys):
    file = place.write({"tasks": [place.tasks[0].replace("choice", "choices")]})
    assert main(["eval", str(file), "--nproc", "2"]) == 2
    assert "choices.yaml: no such file; did you mean" in capsys.readouterr().err


@pytest.mark.slow
def test_torchrun_starts_ranks_of_the_script(place, tmp_path, whole):
    file = place.write({})
    project = Project.__new__(Project)
    project.folder = tmp_path
    script = Path(__file__).parents[2] / "scripts" / "eval.py"
    launcher = [LLMTRAIN[0], "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    status, text = project.run(*launcher, str(script), str(file), f"out={tmp_path / 'out'}")
    assert status == 0, text
    assert scores(json.loads((tmp_path / "out" / "results.json").read_text())) == pytest.approx(scores(whole))


def test_several_models_and_a_gauntlet(place, tmp_path):
    gauntlet = place.folder / "gauntlet.yaml"
    easy = [{"task": "choice.yaml", "shots": 0, "baseline": 0.25}, {"task": "schema.yaml", "shots": 0, "baseline": 0.5}]
    gauntlet.write_text(json.dumps({"name": "both", "categories": {"easy": easy}}))
    step = next(place.model.rglob("step-00000001"))
    changes = {"tasks": [], "gauntlet": str(gauntlet), "model": [str(place.model), str(step)]}
    content = evaluate(place, tmp_path, **changes)
    assert [one["model"] for one in content["results"]] == ["tiny", "tiny", "tiny/step-00000001", "tiny/step-00000001"]
    first = content["results"][0]["value"], content["results"][1]["value"]
    expected = ((first[0] - 0.25) / 0.75 + (first[1] - 0.5) / 0.5) / 2
    assert content["gauntlet"]["tiny"]["averages"]["average"]["value"] == pytest.approx(expected)
    assert "## Gauntlet both" in (tmp_path / "results.md").read_text()
    assert "gauntlet average" in (tmp_path / "results.csv").read_text()
    assert len({round(value, 6) for value in scores(content).values()}) == len({first[0], first[1]})
    assert main(["compare", str(tmp_path), "--out", str(tmp_path / "compare")]) == 0
    compared = json.loads((tmp_path / "compare" / "compare.json").read_text())
    assert [one["metrics"]["acc_sum"]["difference"] for one in compared["tasks"]] == [0.0, 0.0]
    assert compared["gauntlet"]["scores"]["average"]["a"] == pytest.approx(expected)


def test_results_go_to_wandb(place, tmp_path, monkeypatch):
    logged: list[Any] = []

    class Run:
        summary: dict[str, Any] = {}

        def log(self, content: dict[str, Any]) -> None:
            logged.append((dict(self.summary), content))

        def finish(self) -> None:
            logged.append("finished")

    monkeypatch.setenv("WANDB_MODE", "offline")
    peer = SimpleNamespace(  # importing the real one takes ten seconds
        init=lambda **options: logged.append(options) or Run(), Settings=dict, Table=lambda columns, data: data
    )
    monkeypatch.setitem(sys.modules, "wandb", peer)
    content = evaluate(place, tmp_path, tasks=place.tasks[:1], wandb={"project": "p", "tags": ["t"]})
    options, (summary, table), end = logged
    assert options["project"] == "p" and options["tags"] == ["t"] and options["name"] == "try: tiny"
    assert summary["icl/choice-0-shot/acc_sum"] == content["results"][0]["value"] and end == "finished"
    assert summary["icl/choice-0-shot/acc_sum_stderr"] == content["results"][0]["stderr"]
    results, answers = table["icl/results"], table["icl/answers"]
    assert results[0][:6] == ["tiny", "choice", 0, "", "acc_sum", content["results"][0]["value"]] and len(results) == 10
    assert len(answers) == 24 and answers[0][:3] == ["choice", 0, f"{place.folder}/choice.jsonl:1"]


@pytest.mark.parametrize(
    ("changes", "arguments", "messages"),
    [
        ({"taks": []}, [], ["taks", "did you mean tasks?"]),
        ({"tasks": []}, [], ["there is nothing to run; name tasks, or a gauntlet"]),
        ({"models": []}, [], ["there is nothing to evaluate; name models here, or add model=PATH"]),
        ({"tasks": ["arc_chalenge"]}, [], ["there is no task 'arc_chalenge': did you mean arc_challenge"]),
        ({"gauntlet": "sed"}, [], ["there is no gauntlet 'sed': did you mean seed"]),
        ({"convention": "lmeval"}, [], ["expected one of foundry, lm-eval", "did you mean lm-eval?"]),
        ({"models": ["a/x", "b/x"]}, [], ["two models have this name; give each a `name` of its own"]),
        ({}, ["model=[/nowhere]"], ["/nowhere"]),
        ({"cache": "choice.yaml/cache"}, [], ["cache", "choice.yaml is a file, not a folder; choose another"]),
        (
            {"tasks": [{"task": "choice.yaml", "shots": [12]}]},
            [],
            ["12 few-shot examples asked for, but there are only 11"],
        ),
        ({"tasks": ["pmi.yaml"], "pmi": False}, [], ["its headline is acc_pmi, which `pmi: false` leaves out"]),
        (
            {"gauntlet": "of_choice.yaml"},
            [],
            ["choice.yaml has no accuracy 'acc_norm'", "acc_norm is acc_per_char here"],
        ),
        ({"gauntlet": "of_text.yaml"}, [], ["has no accuracy 'word_perplexity'; it measures no accuracy"]),
        ({}, ["limit=0", "dtype=int8"], ["2 errors", "limit", "an integer above 0", "dtype"]),
        ({}, ["--weights", "int4"], ["weights", "expected one of int8, float8"]),
        ({}, ["--nproc", "0"], ["--nproc 0: expected at least 1"]),
    ],
)
def test_what_cannot_be_run_is_reported_before_a_model_is_loaded(
    place, tmp_path, capsys, monkeypatch, changes, arguments, messages
):
    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", None)
    monkeypatch.chdir(tmp_path)
    for name in ("choice", "text"):
        (tmp_path / f"{name}.yaml").write_text((place.folder / f"{name}.yaml").read_text())
        (tmp_path / f"{name}.jsonl").write_text((place.folder / f"{name}.jsonl").read_text())
    pmi = json.loads((tmp_path / "choice.yaml").read_text()) | {"lm_eval": {"metric": "acc_pmi"}}
    (tmp_path / "pmi.yaml").write_text(json.dumps(pmi))
    for name, metric in (("choice", {"metric": "acc_norm"}), ("text", {})):
        benchmark = {"task": f"{name}.yaml", "shots": 0, "baseline": 0.25} | metric
        content = {"name": name, "categories": {"all": [benchmark]}}
        (tmp_path / f"of_{name}.yaml").write_text(json.dumps(content))
    file = place.write(changes)
    assert main(["eval", str(file), *arguments, f"out={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert all(message in said for message in messages), said


def test_a_folder_that_is_a_file_is_reported_before_a_model_is_loaded(place, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", None)
    (tmp_path / "file").touch()
    assert main(["eval", str(place.write({})), f"out={tmp_path}/file/results"]) == 2
    assert f"{tmp_path}/file is a file, not a folder; choose another" in capsys.readouterr().err


def test_what_was_done_before_an_error_is_written(place, tmp_path, capsys, monkeypatch):
    def load(found: FoundModel, *given: Any, **options: Any) -> Any:
        if found.folder.is_relative_to(lost):
            raise EvalError("these weights are damaged")
        return loading.load_scorer(found, *given, **options)

    lost = shutil.copytree(place.model, tmp_path / "lost")
    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", load)
    file = place.write({"tasks": place.tasks[:1], "models": [str(place.model), str(lost)]})
    assert main(["eval", str(file), f"out={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "these weights are damaged" in said and f"{tmp_path} has what was done: 2 results" in said
    written = json.loads((tmp_path / "results.json").read_text())["results"]
    assert [(one["model"], one["shots"]) for one in written] == [("tiny", 0), ("tiny", 2)]


@pytest.fixture
def bad_cloze(place):
    """cloze.jsonl, of whose twelve records two make no document."""
    data = place.folder / "cloze.jsonl"
    before = data.read_text()
    lines = before.splitlines()
    lines[6], lines[9] = json.dumps({"context": "the"}), "{"
    data.write_text("\n".join(lines))
    yield place
    data.write_text(before)


def test_a_task_that_fails_is_reported_before_a_model_is_loaded_and_the_others_go_on(
    bad_cloze, whole, tmp_path, capsys, monkeypatch
):
    told: list[str] = []

    def load(*given: Any, **options: Any) -> Any:
        told.append(capsys.readouterr().err)
        return loading.load_scorer(*given, **options)

    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", load)
    assert main(["eval", str(bad_cloze.write({})), "--out", str(tmp_path)]) == 2
    reason = "cloze.jsonl:7: `continuation`: field `continuation` is missing"
    assert (
        "cloze (0-shot), tiny: not evaluated: task cloze: 2 documents cannot be used" in told[0] and reason in told[0]
    )
    assert reason in capsys.readouterr().err, "it is told again at the end"
    content = json.loads((tmp_path / "results.json").read_text())
    others = {name: value for name, value in scores(whole).items() if "cloze" not in name}
    assert scores(content) == pytest.approx(others)
    [failed] = content["failed"]
    assert failed["title"] == "cloze (0-shot)" and failed["models"] == ["tiny"] and reason in failed["reason"]
    assert (
        "## Not evaluated\n\n- cloze (0-shot) (tiny): task cloze: 2 documents" in (tmp_path / "results.md").read_text()
    )


def test_nothing_is_loaded_if_no_task_is_left(bad_cloze, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("llmtrain.eval.runner.load_scorer", None)
    file = bad_cloze.write({"tasks": [bad_cloze.tasks[2], {"task": bad_cloze.tasks[0], "shots": [12]}]})
    assert main(["eval", str(file), f"out={tmp_path}"]) == 2
    said = capsys.readouterr().err
    assert "cloze (0-shot), tiny: not evaluated" in said and "choice (12-shot), tiny: not evaluated" in said
    assert not (tmp_path / "results.json").exists()


def test_bad_documents_are_left_out_on_demand_and_counted(bad_cloze, tmp_path, capsys):
    content = evaluate(bad_cloze, tmp_path, "--tasks", bad_cloze.tasks[2], "skip_bad_documents=true")
    [result] = content["results"]
    assert (result["documents"], result["skipped"], result["asked"]) == (10, 2, 10)
    assert [Path(where).name for where in result["skipped_documents"]] == ["cloze.jsonl:7", "cloze.jsonl:10"]
    note = "2 of 12 documents left out, as they cannot be used"
    assert f"- tiny, cloze (0-shot): {note}." in (tmp_path / "results.md").read_text()
    assert note in capsys.readouterr().out.splitlines()[0]
    [heads, row] = csv.reader((tmp_path / "results.csv").open())
    assert dict(zip(heads, row, strict=True))["cloze (0-shot) skipped"] == "2"


def test_a_task_that_fails_for_one_model_leaves_a_gap_in_the_tables(place, tmp_path, capsys):
    long = place.folder / "long.jsonl"
    long.write_text(json.dumps({"context": "the", "continuation": "fox " * 60}) + "\n")
    task = {"name": "long", "type": "language_modeling", "source": {"path": long.name}}
    (place.folder / "long.yaml").write_text(json.dumps(task))
    models = [{"path": str(place.model), "name": "a"}, {"path": str(place.model), "name": "b", "max_length": 20}]
    gauntlet = place.folder / "gap.yaml"
    benchmark = {"task": "long.yaml", "shots": 0, "baseline": 0.0, "metric": "acc"}
    gauntlet.write_text(json.dumps({"name": "gap", "categories": {"all": [benchmark]}}))
    changes = {"tasks": [str(place.folder / "long.yaml"), place.tasks[2]], "models": models, "gauntlet": str(gauntlet)}
    assert main(["eval", str(place.write(changes)), "--out", str(tmp_path), "--limit", "1"]) == 2
    said = capsys.readouterr().err
    assert "long (0-shot), b: not evaluated: task long:" in said and "does not fit (at most 20 of them)" in said
    assert "gauntlet gap, b: not evaluated: gauntlet gap: no results for" in said
    content = json.loads((tmp_path / "results.json").read_text())
    assert [(one["model"], one["task"]) for one in content["results"]] == [
        ("a", "long"),
        ("a", "cloze"),
        ("b", "cloze"),
    ]
    assert list(content["gauntlet"]) == ["name", "a"]
    assert "| b | failed |" in (tmp_path / "results.md").read_text()
    rows = list(csv.DictReader((tmp_path / "results.csv").open()))
    assert rows[0]["long (0-shot) acc"] and rows[1]["long (0-shot) acc"] == rows[1]["gauntlet average"] == ""
    assert (tmp_path / "results.png").exists()


def test_tasks_and_shots_of_the_command_line(place, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    choice, cloze = place.tasks[0], place.tasks[2]
    file = place.write({"tasks": [{"task": choice, "shots": [2]}], "gauntlet": "core"})
    assert (
        main(["eval", str(file), "--tasks", f"{choice}, {cloze}", "--shots", "0,1", "--limit", "2", "out=named"]) == 0
    )
    content = json.loads((tmp_path / "named" / "results.json").read_text())
    expected = [("choice", 0), ("choice", 1), ("cloze", 0), ("cloze", 1)]
    assert [(one["task"], one["shots"]) for one in content["results"]] == expected
    assert main(["eval", "--tasks", cloze, f"model={place.model}", "--limit", "1"]) == 0
    assert json.loads((tmp_path / "results" / "eval" / "results.json").read_text())["results"][0]["task"] == "cloze"
    capsys.readouterr()
    for arguments, message in (
        ([], "there is nothing to run; name tasks, or a gauntlet"),
        (["--tasks", "hellaswg", "model=x"], "there is no task 'hellaswg': did you mean hellaswag"),
        (
            ["--tasks", f"{cloze},{place.tasks[3]}", "--shots", "1", "model=x"],
            "task text: the perplexity of a text has no",
        ),
        (["gauntlet=core", "--shots", "1", "model=x"], "a gauntlet says with how many shots its tasks run"),
        (["--tasks", cloze, "--shots", "-1", "model=x"], "an integer at least 0"),
        (["--tasks", cloze, "--data-dir", ".", "model=x"], "the task has no `local` that says what to look for there"),
    ):
        assert main(["eval", *arguments]) == 2
        assert message in " ".join(capsys.readouterr().err.split()), arguments
    for arguments, message in (
        (["--tasks", "a,,b"], "expected names or paths, such as arc_easy,my/task.yaml, found 'a,,b'"),
        (["--shots", "five"], "expected whole numbers, such as 5 or 0,5, found 'five'"),
    ):
        with pytest.raises(SystemExit, match="2"):
            main(["eval", *arguments])
        assert message in capsys.readouterr().err


def test_shipped_files_are_in_order():
    from llmtrain.eval.run_config import load_eval_run

    folder = Path(__file__).parents[2] / "eval"
    files = sorted(folder.glob("*.yaml"))
    assert files
    for file in files:
        for convention in ("foundry", "lm-eval"):
            load_eval_run(file, [f"convention={convention}"], needs_models=False)
