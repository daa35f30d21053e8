"""The report of scripts/gpu/moving_checkpoint.py, of whole runs and of runs that a time limit ended."""

import argparse
import json
from pathlib import Path

import pytest

import llmtrain
from llmtrain.schema.load import load_config
from tests.support.processes import module_of

SCRIPT = Path(llmtrain.__file__).parents[1] / "scripts/gpu/moving_checkpoint.py"
TOTAL = 6


@pytest.fixture(scope="module")
def script():
    return module_of(SCRIPT)


def written(out: Path, run: str, steps: int, shift: float = 0.0, first_id: int = 0) -> None:
    (out / run).mkdir()
    numbers = range(1, steps + 1)
    lines = [json.dumps({"step": n, "loss/train/total": 5.0 - 0.1 * n + shift * (n == 2)}) + "\n" for n in numbers]
    (out / run / "metrics.jsonl").write_text("".join(lines))
    samples = [json.dumps({"step": n, "ids": [first_id + n]}) + "\n" for n in range(1, min(steps + 1, TOTAL) + 1)]
    (out / f"{run}-samples.jsonl").write_text("".join(samples))


def leg(out: Path, at: int, to: int) -> None:
    entry = {"run": "moving", "leg": "cpu", "from": at, "to": to, "seconds": 1.0, "kernels": {"ssd": "reference"}}
    with (out / "legs.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def reported(script, out: Path) -> int:
    config = load_config(script.FILE, [f"train.duration={TOTAL} steps", "schedule.warmup=0 steps"])
    return script._report(argparse.Namespace(out=out, whole="2a", every=2), config)


def test_two_whole_runs(script, tmp_path):
    written(tmp_path, "whole", TOTAL)
    written(tmp_path, "moving", TOTAL, shift=0.01)
    leg(tmp_path, 0, 4)
    leg(tmp_path, 4, 6)
    assert reported(script, tmp_path) == 0
    found = json.loads((tmp_path / "moving.json").read_text())
    assert (found["steps"], found["of"], found["at_step"], found["sample_ids_identical"]) == (6, 6, 2, True)
    assert found["largest_difference"] == pytest.approx(0.01) and len(found["legs"]) == 2
    assert (tmp_path / "moving.png").read_bytes().startswith(b"\x89PNG")


def test_a_run_that_was_cut_short_is_reported_as_far_as_it_came(script, tmp_path, capsys):
    """Its last step may have been begun, and be in no metrics."""
    written(tmp_path, "whole", TOTAL)
    written(tmp_path, "moving", 3)
    leg(tmp_path, 0, 2)
    assert reported(script, tmp_path) == 1
    assert "3 of 6 steps, 1 legs" in capsys.readouterr().out
    assert json.loads((tmp_path / "moving.json").read_text())["sample_ids_identical"]
    assert (tmp_path / "moving.png").exists()


def test_other_samples_are_an_error(script, tmp_path, capsys):
    written(tmp_path, "whole", TOTAL)
    written(tmp_path, "moving", TOTAL, first_id=1)
    assert reported(script, tmp_path) == 1
    assert "sample ids DIFFER" in capsys.readouterr().out


def test_nothing_yet(script, tmp_path, capsys):
    written(tmp_path, "whole", 2)
    assert reported(script, tmp_path) == 1
    assert "nothing to compare yet" in capsys.readouterr().err
