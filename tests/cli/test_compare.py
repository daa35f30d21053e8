"""`llmtrain compare`: what it prints and writes, and what it refuses. The numbers are held by tests/unit/eval/compare."""

import json

import pytest

from llmtrain.cli import main
from tests.support.results import choices, result, write

A, B = [True, False] * 20, [True, True, False, True] * 10


@pytest.fixture
def folders(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a", result("base", "arc", choices(A)), result("base", "rest", choices(A)))
    write(tmp_path / "b", result("base", "arc", choices(B)), result("big", "arc", choices(B)))


def test_two_results(folders, tmp_path, capsys):
    assert main(["compare", "a", "b/results.json", "--model-b", "big", "--examples", "1"]) == 0
    said = capsys.readouterr().out
    out = tmp_path / "results" / "compare-base-big"
    assert (out / "compare.md").read_text() in said and "written: results/compare-base-big/compare.json" in said
    assert "| arc (0-shot) | acc_sum | 40 | 50.0 | 75.0 | +25.00 ±" in said and "Only base has rest (0-shot)." in said
    assert {path.name for path in out.iterdir()} == {f"compare.{kind}" for kind in ("json", "md", "csv", "png")}
    [task] = json.loads((out / "compare.json").read_text())["tasks"]
    assert len(task["b_better"]) == 1 and task["metrics"]["acc_sum"]["p"] == pytest.approx(0.0708, abs=1e-4)


def test_one_result_with_two_models_and_one_model_in_two_results(folders, tmp_path, capsys):
    assert main(["compare", "b", "--out", "here"]) == 0
    assert "# big, compared with base" in capsys.readouterr().out and (tmp_path / "here" / "compare.png").is_file()
    assert main(["compare", "a", "b", "--model-b", "base", "--tasks", "arc"]) == 0
    said = capsys.readouterr().out
    assert "# base (b), compared with base (a)" in said and "results/compare-base_a-base_b/compare.md" in said


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a", "b"], "b has 2 models (base, big); choose one by --model-b"),
        (["a", "b", "--model-b", "bigger"], "--model-b bigger: b has no such model; did you mean big?"),
        (["a", "b", "--model-b", "big", "--tasks", "arcs"], "--tasks arcs: neither result has it; did you mean arc?"),
        (["a", "b", "--model-b", "big", "--tasks", "rest"], "nothing to compare"),
        (["b", "--examples", "-1"], "--examples -1: expected 0 or more"),
        (["b", "--out", "a/results.json"], "--out a/results.json: "),
    ],
)
def test_refusals(folders, capsys, arguments, message):
    assert main(["compare", *arguments]) == 2
    said = capsys.readouterr().err
    assert message in said and "Traceback" not in said
