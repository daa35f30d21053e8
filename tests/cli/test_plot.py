"""`llmtrain plot`: metrics of several runs, in a table and a picture."""

import json
from pathlib import Path

import pytest

from llmtrain.cli import main
from llmtrain.errors import UserError
from llmtrain.train.report.several_runs import read_runs


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs of other batches: 100 and 50 steps, of 10 and 20 tokens each; the first has a validation loss at its end."""
    for name, steps, tokens in (("a", 100, 10), ("b/b", 50, 20)):
        lines = [
            {"step": i, "tokens": i * tokens, "loss/train/cross_entropy": 5 - i / steps} for i in range(1, steps + 1)
        ]
        if name == "a":
            lines.append({"step": steps, "tokens": steps * tokens, "metrics/validation/cross_entropy": 4.25})
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return [str(tmp_path / "a"), str(tmp_path / "b" / "b" / "metrics.jsonl")]


def test_runs_have_a_line_each_and_a_picture(runs, tmp_path, capsys):
    out = tmp_path / "plot.png"
    assert main(["plot", *runs, "--out", str(out)]) == 0
    head, first, second, _ = capsys.readouterr().out.splitlines()
    assert head.split("  ")[-1].strip() == "least validation loss"
    assert first.split() == ["a", "100", "1,000", "4", "4", "4.25", "4.25"]
    assert second.split() == ["b/b", "50", "1,000", "4", "4", "-", "-"]
    assert out.read_bytes().startswith(b"\x89PNG")


def test_another_metric_over_steps(runs, tmp_path, capsys):
    assert main(["plot", runs[0], "--metric", "tokens", "--over", "steps", "--out", str(tmp_path / "p.png")]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["a", "100", "1,000", "1000", "10"]


def test_values_stand_at_the_tokens_of_their_steps(runs):
    a, b = read_runs([Path(run) for run in runs], None)
    assert a.points("loss/train/cross_entropy", "tokens")[0].tolist() == [10.0 * i for i in range(1, 101)]
    assert b.points("loss/train/cross_entropy", "tokens")[0].tolist() == [20.0 * i for i in range(1, 51)]


@pytest.mark.parametrize(
    "given, expected",
    [
        (["nowhere"], "nowhere does not exist: name folders of runs"),
        (["RUN", "--metric", "none"], "has no none over tokens; it has: loss/train/cross_entropy, "),
        (["RUN", "--out", "p.pdf"], "--out p.pdf: expected a name that ends with .png"),
    ],
)
def test_rejects_what_cannot_be_drawn(runs, capsys, given, expected):
    assert main(["plot", *(runs[0] if word == "RUN" else word for word in given)]) == UserError.status
    assert expected in capsys.readouterr().err
